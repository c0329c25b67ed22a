"""Makes a virtual environment for each peer, with pinned versions.

    python -m benchmarks.peers.install NAME... [--venvs DIR] [--torch-index URL]

PyTorch is installed first and from its own index, because the general index has the build for GPUs.
vLLM also needs two libraries: `libtcmalloc_minimal.so.4` from the machine (Debian:
libtcmalloc-minimal4) and OpenMP, which its environment contains. llama.cpp is built from source for
this processor, which needs a C++ compiler.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from benchmarks.peers.catalogue import DEFAULT_VENVS, ENCODERS, PEERS, Peer

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def commands(peer: Peer, venvs: Path, torch_index: str) -> list[list[str]]:
    """Returns the commands that make the peer's environment, or update it to the pinned
    versions."""
    python = peer.python(venvs)
    pip = [str(python), "-m", "pip"]
    found = [[sys.executable, "-m", "venv", str(peer.venv(venvs))]]
    for line in peer.requirements.read_text().splitlines():
        if line.startswith("torch=="):
            index = ["--index-url", torch_index] if torch_index else []
            found.append([*pip, "install", "--no-deps", *index, line])
    found.append([*pip, "install", "--requirement", str(peer.requirements)])
    if peer.unwanted:
        found.append([*pip, "uninstall", "--yes", *peer.unwanted])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = {**PEERS, **ENCODERS}
    parser.add_argument("names", nargs="+", choices=sorted(peers), metavar="NAME")
    parser.add_argument("--venvs", type=Path, default=DEFAULT_VENVS, help="where they go")
    parser.add_argument(
        "--torch-index",
        default=os.environ.get("TORCH_INDEX", TORCH_INDEX),
        help="pip index for PyTorch, empty for the one of everything else; also TORCH_INDEX",
    )
    arguments = parser.parse_args()
    for name in tqdm(arguments.names, desc="peers"):
        environment = os.environ | peers[name].build_environment
        for command in commands(peers[name], arguments.venvs, arguments.torch_index):
            subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
