"""Packages for tests that offer policies and orders, made of the files that an installer writes."""

from pathlib import Path

import pytest


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, points: str, source: str, module: str
) -> None:
    """Makes a module importable, and the entry points of a distribution with it. `points` is the
    content of `entry_points.txt`."""
    (folder / f"{module}.py").write_text(source)
    information = folder / f"{module}-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (information / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(folder)
