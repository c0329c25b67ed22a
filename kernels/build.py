"""Builds the native library, once for each instruction set that processors of this type may have.

    python -m kernels.build [--sanitize [INSTRUCTION_SET ...]]

The build needs g++ 12 or newer, or the compiler that CXX names. The libraries are written to
`kernels/native/lib`; without them PyTorch's operations are used. This module does not import
PyTorch, so that `python kernels/build.py` works where PyTorch is not installed.

With `--sanitize` the libraries end the process at the first access outside of an object and at
undefined behaviour. These libraries are written to another folder, which only tests read
(`make test-sanitizers`), and are not installed. Where instruction sets are named, only their
libraries are built.
"""

import argparse
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
LIBRARIES = NATIVE / "lib"
SANITIZED = LIBRARIES / "sanitized"

PORTABLE = "portable"  # the instruction set that the compiler uses by default
OPTIONS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=off")

# -O1 costs the least time in all, to compile and to run the tests. Optimisation hides no error: it
# removes only vectors that a template's instance does not use, which are no accesses to memory.
SANITIZE = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

_X86_64 = {
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
}


def instruction_sets() -> Mapping[str, Sequence[str]]:
    """Returns the compiler options of each build for this machine's architecture, by instruction
    set, the best one first."""
    return {**(_X86_64 if platform.machine() in ("x86_64", "AMD64") else {}), PORTABLE: ()}


def library_path(instruction_set: str) -> Path:
    """Returns the path of the library that is built for `instruction_set`."""
    return LIBRARIES / f"orcinus_{instruction_set}.so"


def sources_digest() -> str:
    """Returns a digest of the sources and the compiler options. It identifies a build."""
    digest = hashlib.sha256(repr((OPTIONS, instruction_sets())).encode())
    for path in sorted((NATIVE / "src").iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(
    directory: Path = LIBRARIES, further_options: Sequence[str] = (), only: Sequence[str] = ()
) -> None:
    """Compiles and links a library for each instruction set in `only`, or for all of them if it
    is empty, into `directory`. Raises CalledProcessError if the compiler fails."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    sources = sorted((NATIVE / "src").glob("*.cpp"))
    told = f'-DORCINUS_SOURCES="{sources_digest()}"'
    directory.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=directory) as scratch,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        builds = [
            (name, options, [Path(scratch, f"{source.stem}.{name}.o") for source in sources])
            for name, options in instruction_sets().items()
            if not only or name in only
        ]
        commands = [
            [*compiler, *OPTIONS, *further_options, *options, told, "-c", source, "-o", made]
            for _, options, objects in builds
            for source, made in zip(sources, objects, strict=True)
        ]
        list(pool.map(_run, commands))
        for name, _, objects in builds:
            # Without an OpenMP runtime, see `kernels.native.library`.
            unfinished = Path(scratch, name)
            _run([*compiler, *further_options, "-shared", *objects, "-o", unfinished])
            # A process that has the old library open keeps using the old file.
            unfinished.replace(directory / library_path(name).name)


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m kernels.build", description=__doc__)
    parser.add_argument(
        "--sanitize",
        nargs="*",
        choices=instruction_sets(),
        metavar="INSTRUCTION_SET",
        help="for `make test-sanitizers`; all builds unless some are named",
    )
    sanitized = parser.parse_args().sanitize
    try:
        if sanitized is None:
            build()
        else:
            build(SANITIZED, SANITIZE, sanitized)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(f"the native kernels were not built: {error}")
