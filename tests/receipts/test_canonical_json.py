"""Canonical JSON is that of RFC 8785."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.receipts.canonical_json import MAX_WHOLE, canonical

NUMBERS = {
    0.0: "0",
    1.0: "1",
    -1.5: "-1.5",
    1e21: "1e+21",
    1e20: "100000000000000000000",
    123456789012345680000.0: "123456789012345680000",
    333333333.33333329: "333333333.3333333",
    1e-6: "0.000001",
    1e-7: "1e-7",
    4.5e-300: "4.5e-300",
    5e-324: "5e-324",
    1.7976931348623157e308: "1.7976931348623157e+308",
    0.7: "0.7",
    1e23: "1e+23",
}
"""Numbers, and how ECMAScript writes them."""

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_WHOLE, MAX_WHOLE)
    | st.floats(1 - MAX_WHOLE, MAX_WHOLE - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@pytest.mark.parametrize(("number", "written"), NUMBERS.items(), ids=NUMBERS.values())
def test_numbers_are_written_as_ecmascript_writes_them(number: float, written: str) -> None:
    assert canonical(number).decode() == written


def test_members_are_sorted_by_utf_16_and_texts_are_escaped_as_little_as_possible() -> None:
    value = {"€": 1, "\r": 2, "\ufb33": 3, "1": 4, "😀": 5, "\x80": 6, "ö": '\x0f\n"\\/é'}
    assert canonical(value).decode() == (
        '{"\\r":2,"1":4,"\x80":6,"ö":"\\u000f\\n\\"\\\\/é","€":1,"😀":5,"\ufb33":3}'
    )


@given(VALUES)
def test_reading_and_writing_again_changes_nothing(value: Any) -> None:
    written = canonical(value)
    assert canonical(json.loads(written)) == written
    assert json.loads(written) == value


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 2**53, -(2**53), [2**53], "\ud800", {1: 2}, object()]
)
def test_values_without_a_canonical_form_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"double|JSON|surrogates|texts"):
        canonical(value)
