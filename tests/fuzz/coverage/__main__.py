"""Runs a target, `list`s all of them, or runs `all`, one after the other, a share of the inputs
each."""

import argparse
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from tests.fuzz.coverage import targets
from tests.fuzz.coverage.target import Target

NAMES = tuple(sorted(module.name for module in iter_modules(targets.__path__)))

LIMIT_S = 10
"""Seconds that one input may take, on a busy machine."""

LIMIT_MIB = 2048
"""Largest memory of the process, in MiB. PyTorch takes most of it."""


def fuzz(name: str, *, n_runs: int, seed: int, directory: Path) -> None:
    """Runs a target in this process, which atheris ends."""
    import atheris  # an extra that a listing of the targets does not need

    with atheris.instrument_imports(include=["services", "jinja2"]):
        target: Target = import_module(f"{targets.__name__}.{name}").TARGET
    corpus = directory / "corpus"
    corpus.mkdir()
    for number, data in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(data)
    options: dict[str, object] = {
        "runs": n_runs,
        "seed": seed,
        "max_len": target.max_bytes,
        "timeout": LIMIT_S,
        "rss_limit_mb": LIMIT_MIB,
        "artifact_prefix": f"{directory}/",
        "print_final_stats": 1,
        "verbosity": 0,
    }
    if target.words:
        words = directory / "words"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        options["dict"] = words
    given = [sys.argv[0], *(f"-{option}={value}" for option, value in options.items()), str(corpus)]
    atheris.Setup(given, target.run)
    atheris.Fuzz()


def _escaped(word: str) -> str:
    """Returns a word as libFuzzer's dictionaries have it."""
    return "".join(f"\\x{byte:02x}" for byte in word.encode())


def _run(name: str, *, n_runs: int, seed: int) -> int:
    """Runs a target in a process of its own; returns its exit status."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.fuzz.coverage", name]
        command += ["--runs", str(n_runs), "--seed", str(seed), "--in", directory]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print(done.stdout)
            for found in Path(directory).glob("*-*"):
                print(f"{name}: {found.name}: {found.read_bytes()!r}")
    print(f"{name}: {n_runs} inputs in {time.monotonic() - began:.0f} s, seed {seed}", flush=True)
    return done.returncode


def main() -> int:
    """Returns 0 if no input broke a target."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.coverage", description=__doc__)
    parser.add_argument("target", choices=(*NAMES, "all", "list"))
    parser.add_argument("--runs", type=int, default=2000, help="inputs, of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in", type=Path, dest="directory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target == "list":
        print("\n".join(NAMES))
        return 0
    if arguments.directory is not None:
        fuzz(
            arguments.target,
            n_runs=arguments.runs,
            seed=arguments.seed,
            directory=arguments.directory,
        )
    names = NAMES if arguments.target == "all" else (arguments.target,)
    n_runs = -(-arguments.runs // len(names))
    return max([_run(name, n_runs=n_runs, seed=arguments.seed) for name in names])


if __name__ == "__main__":
    sys.exit(main())
