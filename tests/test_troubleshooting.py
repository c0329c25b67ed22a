"""Each message that the page for trouble quotes is one that the code has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.M)
ELSEWHERE = ("unrecognized arguments: ", "exceeded quota: ")
"""Words of argparse and of Kubernetes."""


@pytest.fixture(scope="module")
def texts() -> str:
    """All constant texts of the code, and the files that are not Python but say something too."""
    found = [
        node.value
        for folder in ("services", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    files = ("Makefile", "requirements/install.sh")
    found += [(ROOT / name).read_text(encoding="utf-8") for name in files]
    return "\n".join([*found, *ELSEWHERE]).replace("'\"'\"'", "'")


def test_every_row_quotes_something() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(QUOTED) == len(
        [row for row in rows if not row.startswith(("| what", "| last", "| mes"))]
    )


@pytest.mark.parametrize("message", QUOTED)
def test_the_message_is_one_of_the_code(message: str, texts: str) -> None:
    pieces = [piece for piece in re.split("…", message) if len(piece.strip(" :;()")) > 1]
    assert pieces
    assert [piece for piece in pieces if piece.strip() not in texts] == []
