"""Builds the native library, once for each requested instruction set.

    python -m kernels.build [BUILD ...] [--sanitize]

BUILD is an instruction set, `best` for the best one that this processor supports, `runnable` for
all that this processor supports, or `all` for all instruction sets of this processor's
architecture. Without a BUILD, the best one is built. An existing library is not built again if it
was built from the present sources with the present options.

The build needs g++ 12 or newer, or the compiler that CXX names. The libraries are written to
`kernels/native/lib`; without them PyTorch's operations are used. This module does not import
PyTorch, so that `python kernels/build.py` works where PyTorch is not installed.

With `--sanitize` the libraries end the process at the first access outside of an object and at
undefined behaviour. These libraries are written to another folder, which only tests read (`make
test-sanitizers`), and are not installed.
"""

import argparse
import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
SOURCES = NATIVE / "src"
LIBRARIES = NATIVE / "lib"
SANITIZED = LIBRARIES / "sanitized"

PORTABLE = "portable"  # the instruction set that the compiler uses by default
PROCESSOR = "processor"  # the source, and the library, that tells what the processor has
OPTIONS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-ffp-contract=off")

# -O1 costs the least time in all, to compile and to run the tests. Optimisation hides no error: it
# removes only vectors that a template's instance does not use, which are no accesses to memory.
SANITIZE = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

_X86_64 = {
    "avx512_bf16": ("x86-64-v4", "avx512bf16", "avx512vnni"),
    "avx512": ("x86-64-v4",),
    "avx2": ("x86-64-v3",),
}


def instruction_sets() -> Mapping[str, Sequence[str]]:
    """Returns the instruction sets for this machine's architecture, the best one first. Each is
    mapped to the processor features that its build uses and therefore requires. The features have
    the compiler's names."""
    return {**(_X86_64 if platform.machine() in ("x86_64", "AMD64") else {}), PORTABLE: ()}


def runnable_with(features: Collection[str]) -> list[str]:
    """Returns the instruction sets that a processor with `features` supports, the best one
    first."""
    return [name for name, needed in instruction_sets().items() if set(needed) <= set(features)]


def named_by(words: Collection[str], features: Collection[str]) -> list[str]:
    """Returns the instruction sets that `words` name, the best one first. A word is an instruction
    set, `all`, or `best` or `runnable`, which depend on the processor's `features`.

    Raises ValueError for another word.
    """
    runnable, known = runnable_with(features), list(instruction_sets())
    groups = {"best": runnable[:1], "runnable": runnable, "all": known}
    groups |= {name: [name] for name in known}
    if unknown := set(words) - set(groups):
        raise ValueError(f"no build {', '.join(sorted(unknown))}; there are {', '.join(groups)}")
    names = {name for word in words for name in groups[word]}
    return [name for name in known if name in names]


def processor_features(directory: Path | None = None) -> frozenset[str]:
    """Returns the features of this processor, among those that any build requires. The library
    PROCESSOR in `directory`, by default LIBRARIES, detects them.

    Raises OSError if that library is missing or cannot be loaded, and RuntimeError if it cannot
    detect one of the features.
    """
    has = ctypes.CDLL(str(library_path(PROCESSOR, directory))).orcinus_has_feature
    answers = {
        feature: has(feature.encode())
        for needed in instruction_sets().values()
        for feature in needed
    }
    if -1 in answers.values():
        raise RuntimeError(f"{PROCESSOR}.cpp must know each of {', '.join(answers)}")
    return frozenset(feature for feature, answer in answers.items() if answer)


def library_path(name: str, directory: Path | None = None) -> Path:
    """Returns the path of the library `name`, which is an instruction set or PROCESSOR, in
    `directory`. If `directory` is None, returns the path of the installed library."""
    return (directory or LIBRARIES) / f"orcinus_{name}.so"


def is_current(path: Path) -> bool:
    """Returns whether the library at `path` exists and was built from the present sources and
    options. The library is not loaded: the processor may be unable to run it."""
    try:
        return sources_digest().encode() in path.read_bytes()
    except FileNotFoundError:
        return False


def missing_of(names: Iterable[str], directory: Path) -> list[str]:
    """Returns the names of the libraries that are missing in `directory` or are not current."""
    return [name for name in names if not is_current(library_path(name, directory))]


def sources_digest() -> str:
    """Returns a digest of the sources and the compiler options. It identifies a build."""
    digest = hashlib.sha256(repr((OPTIONS, SANITIZE, instruction_sets())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(names: Iterable[str], directory: Path, further_options: Sequence[str] = ()) -> None:
    """Compiles and links each library in `names`, which are instruction sets or PROCESSOR, into
    `directory`. Skips libraries that exist and are current. Removes libraries that were built from
    other sources.

    Raises FileNotFoundError without a compiler, and CalledProcessError if the compiler fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("orcinus_*.so"):
        if not is_current(path):
            path.unlink(missing_ok=True)
    missing = missing_of(names, directory)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        units = [unit for name in missing for unit in _units(name, Path(scratch))]
        _compile(units, further_options)
        for name in missing:
            # Without an OpenMP runtime, see `kernels.native.library`.
            unfinished = Path(scratch, name)
            objects = [unit.object for unit in units if unit.build == name]
            _run([*_compiler(), *further_options, "-shared", *objects, "-o", unfinished])
            # A process that has the old library open keeps using the old file.
            unfinished.replace(library_path(name, directory))


@dataclass(frozen=True, slots=True)
class _Unit:
    """A source file to compile for one library, and the object file that the compiler writes."""

    build: str
    source: Path
    object: Path


def _units(name: str, scratch: Path) -> list[_Unit]:
    sources = SOURCES.glob(f"{PROCESSOR}.cpp" if name == PROCESSOR else "*.cpp")
    return [_Unit(name, source, scratch / f"{source.stem}.{name}.o") for source in sources]


def _compile(units: Iterable[_Unit], further_options: Sequence[str]) -> None:
    told = f'-DORCINUS_SOURCES="{sources_digest()}"'
    command = [*_compiler(), *OPTIONS, *further_options, told]
    commands = [
        [*command, *_options(unit.build), "-c", unit.source, "-o", unit.object]
        # The largest source takes longest, so it must not begin last.
        for unit in sorted(units, key=lambda unit: -unit.source.stat().st_size)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))


def _options(name: str) -> list[str]:
    """Returns the compiler options for the processor features that the library `name` uses."""
    return [
        f"-march={feature}" if feature.startswith("x86-64") else f"-m{feature}"
        for feature in instruction_sets().get(name, ())
    ]


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    """Builds the libraries that the command line names. Ends the process with a message if that
    fails."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("builds", nargs="*", metavar="BUILD", default=["best"])
    parser.add_argument("--sanitize", action="store_true", help="for `make test-sanitizers`")
    arguments = parser.parse_args()
    directory, further_options = (SANITIZED, SANITIZE) if arguments.sanitize else (LIBRARIES, ())
    try:
        build([PROCESSOR], directory)
        names = named_by(arguments.builds, processor_features(directory))
        if missing := missing_of(names, directory):
            sys.stdout.write(f"Compiling the native kernels for {', '.join(missing)}\n")
            sys.stdout.flush()
        build(names, directory, further_options)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"the native kernels were not built: {error}")


if __name__ == "__main__":
    main()
