"""Receipts are written as `rfc8785` writes them, only faster."""

from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from services.receipts.canonical_json import MAX_WHOLE, canonical_json
from tests.receipts.made import hidden, signed

NUMBERS = st.lists(st.integers(-MAX_WHOLE, MAX_WHOLE) | st.booleans() | st.floats(-9, 9))
LEAVES = st.none() | st.text(max_size=4) | NUMBERS
NAMES = st.text(st.sampled_from('aé\ue000\U0001f600"'), max_size=3)


@given(st.dictionaries(NAMES, LEAVES | st.dictionaries(NAMES, LEAVES, max_size=3), max_size=4))
def test_any_object_is_written_the_same(value: dict[str, Any]) -> None:
    assert canonical_json(value) == rfc8785.dumps(value)


@pytest.mark.parametrize("prompt", [{"tokens": list(range(300))}, hidden([1, 2])], ids=str)
def test_a_receipt_is_written_the_same(prompt: dict[str, Any]) -> None:
    receipt = signed(prompt=prompt)
    assert canonical_json(receipt) == rfc8785.dumps(receipt)


@pytest.mark.parametrize(
    "value", [{"a": [MAX_WHOLE + 1]}, {"\ud800": 1}, {"a": ["\ud800"]}, {"a": [float("nan")]}]
)
def test_what_has_no_canonical_form_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        canonical_json(value)


def test_long_prompts_are_not_written_number_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    write = rfc8785.dumps

    def noted(value: Any) -> bytes:
        written.append(value)
        return write(value)

    monkeypatch.setattr(rfc8785, "dumps", noted)
    signed(prompt={"tokens": list(range(100_000))})
    assert written
    assert not any(isinstance(value, list | dict) and len(value) > 50 for value in written)
