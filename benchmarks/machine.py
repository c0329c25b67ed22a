"""A description of the machine on which a measurement runs, made with the standard library."""

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def describe() -> dict[str, Any]:
    """Returns the commit, machine, command and time of a measurement, for its record."""
    module = sys.modules["__main__"].__spec__
    program = ["-m", module.name.removesuffix(".__main__")] if module else sys.argv[:1]
    return {
        "commit": commit(),
        "machine": {
            "cpu": cpu_name(),
            "n_cpus": os.cpu_count(),
            "memory_gib": round(memory_bytes() / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
        "command": shlex.join(["python", *program, *sys.argv[1:]]),
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def memory_bytes() -> int:
    """Returns the size of the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def commit() -> str | None:
    """Returns the commit of the working tree, followed by `-dirty` if there are changes.

    Returns None outside a repository, and where git is missing.
    """
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        said = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return said.stdout.strip() or None


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the name of the processor, or its architecture if it has no name."""
    with contextlib.suppress(FileNotFoundError):
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()
