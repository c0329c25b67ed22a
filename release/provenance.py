"""The statement of where the files of a release come from: from which commit and by which tools.

The form is an in-toto statement (https://in-toto.io/Statement/v1) with SLSA's predicate for builds
(https://slsa.dev/spec/v1.0/provenance). It is not signed: whoever publishes the files signs it. It
has no times, so that the same commit, compiler and programs make the same bytes.
"""

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernels import build
from services.common.version import VERSION

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD = "urn:orcinus:build:release:1"
"""Name of the kind of build: `make release` of the commit that is checked out."""

BUILDER = "urn:orcinus:builder:checkout"
"""Name of the builder: a checkout on any machine. A reader can trust it as far as the signer."""


def statement(
    files: Iterable[Path],
    *,
    commit: str,
    root: Path,
    materials: Sequence[str],
    machines: Sequence[str],
) -> dict[str, Any]:
    """Returns the statement about `files`, made from a commit. `materials` are the files below
    `root`, the checkout, that pin the programs and packages of the build. `machines` are the
    architectures for which something was compiled."""
    return {
        "_type": STATEMENT,
        "subject": [_resource(file.name, file) for file in sorted(files)],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {"version": VERSION, "command": "make release"},
                "internalParameters": {
                    "python": platform.python_version(),
                    "cxx": {machine: compiler_of(machine) for machine in machines},
                },
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": commit}},
                    *(_resource(name, root / name) for name in sorted(materials)),
                ],
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }


def compiler_of(machine: str) -> str:
    """Returns the first line in which the C++ compiler for a machine names itself."""
    command = [*build.compiler(machine), "--version"]
    return subprocess.check_output(command, text=True).partition("\n")[0]


def write(file: Path, made: dict[str, Any]) -> None:
    """Writes a statement as JSON."""
    file.write_text(f"{json.dumps(made, indent=2)}\n", encoding="utf-8")


def _resource(name: str, file: Path) -> dict[str, Any]:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"name": name, "digest": {"sha256": digest}}
