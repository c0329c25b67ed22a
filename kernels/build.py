"""Builds the native library, once for each requested instruction set.

    python -m kernels.build [BUILD ...] [--sanitize] [--machine MACHINE]

BUILD is the name of an instruction set, or `best` for the best one that this processor supports,
`runnable` for all instruction sets that it supports, or `all` for all instruction sets of its
architecture. Without a BUILD, the best one is built. An existing library is not built again if it
was built from the present sources with the present options.

With `--machine`, the libraries are for another machine, such as aarch64, and are compiled by a
cross-compiler: g++ as Debian calls it, `aarch64-linux-gnu-g++`, or the one that CROSS_CXX names.
BUILD is then an instruction set of that machine, or `all`. Libraries of this machine are removed.

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

HERE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
"""Name of this machine's architecture, as Linux calls it."""

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


def instruction_sets(machine: str = HERE) -> Mapping[str, Sequence[str]]:
    """Returns the instruction sets for an architecture, the best one first. Each is mapped to the
    processor features that its build uses and therefore requires. The features have the compiler's
    names."""
    return {**(_X86_64 if machine == "x86_64" else {}), PORTABLE: ()}


def runnable_with(features: Collection[str]) -> list[str]:
    """Returns the instruction sets that a processor with `features` supports, the best one
    first."""
    return [name for name, needed in instruction_sets().items() if set(needed) <= set(features)]


def named_for(machine: str, words: Collection[str]) -> list[str]:
    """Returns the instruction sets of another machine that `words` name, the best one first. A word
    is an instruction set or `all`.

    Raises ValueError for another word.
    """
    known = list(instruction_sets(machine))
    return _named(words, known, {"all": known})


def named_by(words: Collection[str], features: Collection[str]) -> list[str]:
    """Returns the instruction sets that `words` name, the best one first. A word is an instruction
    set, `all`, `best` or `runnable`. The last two depend on the processor's `features`.

    Raises ValueError for another word.
    """
    runnable, known = runnable_with(features), list(instruction_sets())
    return _named(words, known, {"best": runnable[:1], "runnable": runnable, "all": known})


def _named(
    words: Collection[str], known: Sequence[str], of_groups: Mapping[str, Sequence[str]]
) -> list[str]:
    groups = {**of_groups, **{name: [name] for name in known}}
    if unknown := set(words) - set(groups):
        raise ValueError(f"no build {', '.join(sorted(unknown))}; there are {', '.join(groups)}")
    names = {name for word in words for name in groups[word]}
    return [name for name in known if name in names]


def processor_features(directory: Path | None = None) -> frozenset[str]:
    """Returns the features that this processor has, among the features that an instruction set
    requires. The library PROCESSOR detects them. It is loaded from `directory`, by default from
    LIBRARIES.

    Raises OSError if the library is missing or cannot be loaded, and RuntimeError if the library
    cannot detect one of the features.
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


def is_current(path: Path, machine: str = HERE) -> bool:
    """Returns whether the library at `path` exists and was built from the present sources and
    options, for `machine`. The library is not loaded: the processor may be unable to run it."""
    try:
        return sources_digest(machine).encode() in path.read_bytes()
    except FileNotFoundError:
        return False


def missing_of(names: Iterable[str], directory: Path, machine: str = HERE) -> list[str]:
    """Returns the names of the libraries that are missing in `directory` or are not current."""
    return [name for name in names if not is_current(library_path(name, directory), machine)]


def sources_digest(machine: str = HERE) -> str:
    """Returns a digest of the sources and of the compiler options for `machine`. Every library
    contains the digest with which it was built."""
    digest = hashlib.sha256(repr((OPTIONS, SANITIZE, instruction_sets(machine))).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(
    names: Iterable[str],
    directory: Path,
    further_options: Sequence[str] = (),
    *,
    machine: str = HERE,
) -> None:
    """Compiles and links each library in `names`, which are instruction sets of `machine` or
    PROCESSOR, into `directory`. Skips libraries that exist and are current. Removes libraries that
    were built from other sources or for another machine.

    Raises FileNotFoundError if there is no compiler, and CalledProcessError if the compiler fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("orcinus_*.so"):
        if not is_current(path, machine):
            path.unlink(missing_ok=True)
    missing = missing_of(names, directory, machine)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        units = [unit for name in missing for unit in _units(name, Path(scratch))]
        _compile(units, further_options, machine)
        for name in missing:
            # Without an OpenMP runtime, see `kernels.native.library`.
            unfinished = Path(scratch, name)
            objects = [unit.object for unit in units if unit.build == name]
            _run([*compiler(machine), *further_options, "-shared", *objects, "-o", unfinished])
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


def _compile(units: Iterable[_Unit], further_options: Sequence[str], machine: str) -> None:
    told = f'-DORCINUS_SOURCES="{sources_digest(machine)}"'
    command = [*compiler(machine), *OPTIONS, *further_options, told]
    commands = [
        [*command, *_options(unit.build, machine), "-c", unit.source, "-o", unit.object]
        # The largest source takes longest, so it must not begin last.
        for unit in sorted(units, key=lambda unit: -unit.source.stat().st_size)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))


def _options(name: str, machine: str) -> list[str]:
    """Returns the compiler options for the processor features that the library `name` uses."""
    return [
        f"-march={feature}" if feature.startswith("x86-64") else f"-m{feature}"
        for feature in instruction_sets(machine).get(name, ())
    ]


def compiler(machine: str = HERE) -> list[str]:
    """Returns the command that compiles for `machine`, as a list of words."""
    if machine == HERE:
        return shlex.split(os.environ.get("CXX", "g++"))
    return shlex.split(os.environ.get("CROSS_CXX", f"{machine}-linux-gnu-g++"))


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    """Builds the libraries that the command line names. If the build fails, ends the process with
    an error message."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("builds", nargs="*", metavar="BUILD", default=["best"])
    parser.add_argument("--sanitize", action="store_true", help="for `make test-sanitizers`")
    parser.add_argument("--machine", default=HERE, help="compile for another one, such as aarch64")
    arguments = parser.parse_args()
    machine: str = arguments.machine
    directory, further_options = (SANITIZED, SANITIZE) if arguments.sanitize else (LIBRARIES, ())
    try:
        build([PROCESSOR], directory, machine=machine)
        if machine == HERE:
            names = named_by(arguments.builds, processor_features(directory))
        else:
            names = named_for(machine, arguments.builds)
        if missing := missing_of(names, directory, machine):
            sys.stdout.write(f"Compiling the native kernels for {', '.join(missing)}\n")
            sys.stdout.flush()
        build(names, directory, further_options, machine=machine)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"the native kernels were not built: {error}")


if __name__ == "__main__":
    main()
