"""Reads lock files, and follows what packages require of each other, for any Python and machine.

What a package requires comes from the metadata of the version that is installed here. Markers in
it are evaluated for the Python and the machine that a test names.
"""

import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"

_ENTRY = re.compile(r"(?P<requirement>[^#\s][^\\]*?)(?P<hashes>(?:\s+--hash=sha256:[0-9a-f]{64})+)")


@dataclass(frozen=True, slots=True)
class Target:
    """A Python and a machine that a lock is for."""

    python: str
    machine: str
    system: str = "linux"

    def __str__(self) -> str:
        return f"{self.python}-{self.machine}"

    def markers(self) -> dict[str, str]:
        """Returns the values of environment markers on this target."""
        return {
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "platform_machine": self.machine,
            "platform_system": self.system.capitalize(),
            "sys_platform": self.system,
            "os_name": "posix",
            "extra": "",
        }


@cache
def entries(lock: Path) -> list[Requirement]:
    """Returns what the lines of a lock require.

    Raises AssertionError if a line is not one package with hashes.
    """
    text = lock.read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = []
    for line in lines:
        match = _ENTRY.fullmatch(line)
        assert match, f"{lock.name}: {line}"
        found.append(Requirement(match["requirement"]))
    return found


def versions(lock: Path, target: Target) -> dict[str, str]:
    """Returns the versions that a lock installs on a target, by names of packages."""
    markers = target.markers()
    found: dict[str, str] = {}
    for entry in entries(lock):
        if entry.marker is None or entry.marker.evaluate(markers):
            [pinned] = entry.specifier
            assert pinned.operator == "=="
            name = canonicalize_name(entry.name)
            assert name not in found, f"{lock.name} has {name} twice"
            found[name] = pinned.version
    return found


def required(roots: Iterable[str], target: Target, leaves: Iterable[str]) -> list[Requirement]:
    """Returns all that `roots` lead to on a target: requirements of requirements, too. What the
    packages `leaves` require is left out."""
    waiting = [Requirement(root) for root in roots]
    seen: set[str] = set()
    found = []
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen or not _applies(requirement, target, ()):
            continue
        seen.add(str(requirement))
        found.append(requirement)
        if canonicalize_name(requirement.name) not in leaves:
            waiting += _requirements_of(requirement, target)
    return found


def requires_python(package: str) -> str:
    """Returns the versions of Python that a package allows, for the version that is installed here.
    The result is empty if it allows all, or if the package is not installed here."""
    try:
        metadata = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return "".join(metadata.get_all("Requires-Python", []))


def _requirements_of(requirement: Requirement, target: Target) -> Iterator[Requirement]:
    for further in _installed_requirements(canonicalize_name(requirement.name)):
        if _applies(further, target, requirement.extras):
            unconditional = copy(further)
            unconditional.marker = None
            yield unconditional


@cache
def _installed_requirements(package: str) -> list[Requirement]:
    return [Requirement(text) for text in importlib.metadata.requires(package) or []]


def _applies(requirement: Requirement, target: Target, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({**target.markers(), "extra": extra}) for extra in ("", *extras)
    )
