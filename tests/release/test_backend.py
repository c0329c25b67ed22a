"""What a wheel is built with, and the tag that its libraries need."""

from pathlib import Path

import pytest

from release import backend

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("names", "version"),
    [
        (["GLIBC_2.2.5", "GLIBC_2.29", "GLIBC_2.14"], (2, 29)),
        (["GLIBC_2.4", "GLIBCXX_3.4.30"], (2, 4)),
        (["GLIBC_2.9", "GLIBC_2.10"], (2, 10)),
        (["strcmp"], backend.OLDEST),
    ],
)
def test_the_newest_function_of_glibc_counts(names: list[str], version: tuple[int, int]) -> None:
    library = b"\0".join([b"\x7fELF", *(name.encode() for name in names), b""])
    assert backend.needed_glibc(library) == version


def test_the_compiler_of_the_contracts_is_the_one_that_is_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    [tools] = [it for it in backend.get_requires_for_build_wheel() if "grpcio-tools" in it]
    for name in ("release/requirements.in", "constraints.txt"):
        assert tools in Path(name).read_text(encoding="utf-8").splitlines()
