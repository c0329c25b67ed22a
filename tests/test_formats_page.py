"""The page of message formats says what the registry of formats says."""

import pytest

from tests import formats_page

PAGE = formats_page.PAGE.read_text(encoding="utf-8")


def test_the_page_has_every_format_as_the_code_has_it() -> None:
    assert formats_page.written(PAGE) == PAGE, "`python -m tests.formats_page` writes the tables"


@pytest.mark.parametrize("cell", ["`harmony`", "`qwen3_coder`", "`think`"])
def test_a_table_without_a_format_is_written_anew(cell: str) -> None:
    lines = [line for line in PAGE.splitlines(keepends=True) if f" {cell} " not in line]
    assert formats_page.written("".join(lines)) == PAGE
