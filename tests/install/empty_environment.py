"""An empty virtual environment without a compiler, in which a wheel serves a model.

    python -m tests.install.empty_environment WHEEL [MODEL]

installs the wheel with the versions of constraints.txt, runs `orcinus serve` with MODEL, by default
models/demo, asks for tokens, and prints what each step took.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVES = re.compile(r"Orcinus serves .*: OpenAI (https?://\S+)/v1 ")
COMPILERS = ("c++", "cc", "clang", "clang++", "g++", "gcc", "ld", "make", "cmake", "cargo", "rustc")
START_LIMIT_S = 600


class EmptyEnvironment:
    """A virtual environment with nothing in it but pip, where every compiler fails."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        hidden = directory / "hidden"
        hidden.mkdir()
        for name in COMPILERS:
            (hidden / name).write_text(f"#!/bin/sh\necho there is no {name} >&2\nexit 127\n")
            (hidden / name).chmod(0o755)
        subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
        self.bin = directory / "venv" / "bin"
        left_out = ("CXX", "CC", "PYTHONPATH", "VIRTUAL_ENV")
        self._variables = {key: value for key, value in os.environ.items() if key not in left_out}
        self._variables["PATH"] = os.pathsep.join(
            [str(self.bin), str(hidden), *os.environ["PATH"].split(os.pathsep)]
        )

    def install(self, wheel: Path) -> None:
        """Installs a wheel with the versions that are tested together. PyTorch comes from wherever
        pip's settings say."""
        pip = [str(self.bin / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        torch = [it for it in constraints() if it.startswith("torch==")]
        constrained = ["-c", str(ROOT / "constraints.txt")]
        self.run(*pip, *torch)
        self.run(*pip, *constrained, "--only-binary", ":all:", str(wheel.absolute()))

    def run(self, *command: str | Path) -> str:
        """Runs a program outside of the checkout, and returns its output.

        Raises CalledProcessError if it fails.
        """
        return subprocess.run(
            command,
            cwd=self._directory,
            env=self._variables,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    @contextmanager
    def serving(self, model: Path) -> Iterator[str]:
        """Serves a model by `orcinus serve`; its URL.

        Raises AssertionError if the command ends before it serves.
        """
        ports = ("--http-port=0", "--grpc-port=0")
        command = [str(self.bin / "orcinus"), "serve", str(model), *ports]
        with subprocess.Popen(
            command,
            cwd=self._directory,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                yield _url(process)
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.stdout is not None
                process.stdout.read()


def constraints() -> list[str]:
    """Returns the versions that are tested together."""
    return (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def _url(process: subprocess.Popen[str]) -> str:
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if found := SERVES.search(line):
            return found[1]
    raise AssertionError(f"`orcinus serve` ended: {''.join(lines)}")


def ask(url: str) -> str:
    """Returns what a model writes."""
    body = json.dumps({"prompt": "If the file does not exist,", "max_tokens": 8}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=START_LIMIT_S) as response:
        text: str = json.load(response)["choices"][0]["text"]
        return text


def main(wheel: Path, model: Path) -> None:
    """Prints what each step took."""
    with tempfile.TemporaryDirectory() as made:
        start = time.monotonic()

        def tell(what: str) -> None:
            sys.stdout.write(f"{time.monotonic() - start:6.1f} s  {what}\n")

        environment = EmptyEnvironment(Path(made))
        tell("an empty virtual environment")
        environment.install(wheel)
        tell("the wheel is installed")
        with environment.serving(model.absolute()) as url:
            tell("it serves")
            tell(f"it answers without a compiler: {ask(url)!r}")


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    main(given[0], given[1] if len(given) > 1 else ROOT / "models" / "demo")
