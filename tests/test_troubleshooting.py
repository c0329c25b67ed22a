"""Each message that the page for trouble quotes is one that the code has."""

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
    """The code, with literals that Python joins as one literal, and the other files that have
    messages."""
    paths = [path for folder in ("services", "kernels") for path in (ROOT / folder).rglob("*.py")]
    paths += [ROOT / "Makefile", ROOT / "requirements" / "install.sh"]
    code = "\n".join([path.read_text(encoding="utf-8") for path in paths] + [*ELSEWHERE])
    joined = re.sub(r"""(["'])\s*\n\s*f?\1""", "", code)
    return joined.replace("'\"'\"'", "'").replace('\\"', '"').replace("{{", "{").replace("}}", "}")


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
