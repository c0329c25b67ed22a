"""Builds are told apart by their sources and messages."""

from pathlib import Path
from types import ModuleType

import pytest

from services.worker.rank import build
from services.worker.rank.build import build_digest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only package that counts, with two files."""
    module = ModuleType("package")
    module.__path__ = [str(tmp_path)]
    monkeypatch.setattr(build, "PACKAGES", (module,))
    (tmp_path / "one.py").write_text("one")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "two.py").write_text("two")
    return tmp_path


def test_the_same_files_are_the_same_build_wherever_they_lie() -> None:
    assert build_digest() == build_digest()


@pytest.mark.parametrize(
    ("path", "content"),
    [("one.py", "One"), ("inner/two.py", "two "), ("three.py", ""), ("inner/four.cpp", "")],
    ids=["changed", "longer", "new", "native"],
)
def test_any_other_code_is_another_build(package: Path, path: str, content: str) -> None:
    before = build_digest()
    (package / path).write_text(content)
    assert build_digest() != before


@pytest.mark.parametrize("path", ["__pycache__/one.cpython-311.pyc", "lib/four_avx2.so"])
def test_what_is_made_of_the_files_does_not_count(package: Path, path: str) -> None:
    before = build_digest()
    (package / path).parent.mkdir()
    (package / path).write_bytes(b"x")
    assert build_digest() == before
