"""The reference of the API says what the code does, and all of it."""

import pytest

from tests import api_page

PAGE = api_page.PAGE.read_text(encoding="utf-8")
COMPLETE = "`python -m tests.api_page` writes what is missing; what it means is yours to say"


def test_the_page_has_every_route_field_and_error_as_the_code_has_it() -> None:
    found = api_page.faults(PAGE)
    assert not found, "\n".join((COMPLETE, *found))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (
            "| `min_p` | number | 0 | 0 to 1 |",
            "| `min_p` | number | 2 | 0 to 1 |",
            "-| `min_p` | number | 2",
        ),
        (
            "| `top_p` | float | 1 | 0 to 1 |",
            "| `top_p` | float | 1 | above 0, to 1 |",
            "-| `top_p` | float | 1 | above 0, to 1 |",
        ),
        (
            "| `echo` | boolean | false | any | Whether to begin each",
            "| `echo` | boolean | false | any | Whether to end each",
            "-| `echo` | boolean | false | any | Whether to end each",
        ),
        ("| `echo` | bool | ", "| `echoes` | bool | ", "+| `echo` | bool | "),
        ("| `echo` | bool | ", "| `echoes` | bool | ", "-| `echoes` | bool | "),
        ("| `PoolFull` | 429 |", "| `PoolFull` | 503 |", "-| `PoolFull` | 503 |"),
        ("| `Detokenize` |", "| `ToText` |", "+| `Detokenize` |"),
        ("| `GET /health` |", "| `GET /healthz` |", "-| `GET /healthz` |"),
        (
            "| `FINISH_REASON_LENGTH` | It has max_tokens tokens |",
            "| `FINISH_REASON_LENGTH` | … |",
            "enum FinishReason: `FINISH_REASON_LENGTH` has no meaning",
        ),
        ("<!-- message Tool -->", "", "+<!-- message Tool -->"),
        (
            "<!-- message Tool -->",
            "<!-- message Tools -->",
            "there is no such subject: message Tools",
        ),
    ],
    ids=lambda text: text[:60],
)
def test_a_page_that_says_something_else_is_found(old: str, new: str, found: str) -> None:
    assert PAGE.count(old) == 1
    changed = PAGE.replace(old, new)
    assert any(line.startswith(found) for line in api_page.faults(changed))


def test_missing_rows_and_tables_are_written_and_ask_for_their_meaning() -> None:
    without = PAGE.replace("<!-- message Tool -->", "")
    lines = [
        line for line in without.splitlines(True) if not line.startswith("| `top_k` | integer")
    ]
    left = api_page.faults(api_page.rewritten("".join(lines)))
    assert left
    assert all(line.endswith("has no meaning") for line in left)


def test_a_row_may_not_be_there_twice() -> None:
    (row,) = [line for line in PAGE.splitlines(True) if line.startswith("| `PoolFull` |")]
    with pytest.raises(ValueError, match=r"errors has `PoolFull` twice"):
        api_page.faults(PAGE.replace(row, 2 * row))
