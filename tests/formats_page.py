"""The tables of formats in `docs/message-formats.md`, made from the registry of formats.

`python -m tests.formats_page` writes them. Each table follows a comment with its name.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from services.frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "message-formats.md"

TABLE = re.compile(r"(<!-- (tools|reasoning) -->\n)(?:\|.*\n)*")


def table(kind: str) -> str:
    """Returns the table of the formats of a kind, `tools` or `reasoning`."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in _rows(kind))


def written(page: str) -> str:
    """Returns the page with its tables replaced by those that follow from the code."""
    return TABLE.sub(lambda found: found[1] + table(found[2]), page)


def _rows(kind: str) -> Iterator[tuple[str, ...]]:
    if kind == "reasoning":
        yield "models", "reasoning_parser"
        yield "---", "---"
        for reasoning in REASONING_FORMATS.values():
            yield reasoning.models, f"`{reasoning.name}`"
        return
    yield "models", "tool_parser", "calls can be forced", "several calls in one answer"
    yield "---", "---", "---", "---"
    for tools in TOOL_FORMATS.values():
        yield (
            tools.models,
            f"`{tools.name}`",
            "yes" if tools.has_grammar else "no",
            "yes" if tools.has_parallel_calls else "no",
        )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
