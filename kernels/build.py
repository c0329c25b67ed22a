"""Builds the native library, once for each instruction set that a machine of this kind may have.

    python -m kernels.build [--sanitize]

Needs g++ 12 or newer, or the compiler that CXX names. The libraries lie in `kernels/native/lib`;
without them everything works on PyTorch's operations. Knows nothing of PyTorch, so that it works
where there is none: `python kernels/build.py` does the same.

With `--sanitize` the libraries end the process at the first access outside of an object and at
undefined behaviour. They lie in a folder of their own, which only tests look into
(`make test-sanitizers`), and are not installed.
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

PORTABLE = "portable"  # what every processor has that the compiler compiles for
OPTIONS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=off")

# Of the level that costs the least time in all, to compile and to run the tests. Vectors that a
# template's instance does not use are no accesses, so what is optimised away hides nothing.
SANITIZE = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

_X86_64 = {
    "avx512_bf16": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
}


def instruction_sets() -> Mapping[str, Sequence[str]]:
    """Returns the compiler options of each build for this kind of machine, best first."""
    return {**(_X86_64 if platform.machine() in ("x86_64", "AMD64") else {}), PORTABLE: ()}


def library_path(instruction_set: str) -> Path:
    """Returns where the build for `instruction_set` lies."""
    return LIBRARIES / f"orcinus_{instruction_set}.so"


def sources_digest() -> str:
    """Returns a digest that tells builds of other sources, or with other options, apart."""
    digest = hashlib.sha256(repr((OPTIONS, instruction_sets())).encode())
    for path in sorted((NATIVE / "src").iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(directory: Path = LIBRARIES, further_options: Sequence[str] = ()) -> None:
    """Compiles and links all builds into `directory`; raises CalledProcessError if the compiler
    refuses."""
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
            # A process that has the old one open keeps it.
            unfinished.replace(directory / library_path(name).name)


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m kernels.build", description=__doc__)
    parser.add_argument("--sanitize", action="store_true", help="for `make test-sanitizers`")
    try:
        if parser.parse_args().sanitize:
            build(SANITIZED, SANITIZE)
        else:
            build()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(f"the native kernels were not built: {error}")
