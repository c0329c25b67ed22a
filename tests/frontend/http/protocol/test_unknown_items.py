"""Which items of unknown types are left out, and which are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.http.protocol.unknown_items import (
    DOCUMENTS,
    LEFT_OUT,
    MAX_DEPTH,
    PICTURES,
    REFUSED,
    tag_of_unknown,
)

LABELS = st.dictionaries(
    st.sampled_from(["id", "call_id", "status", "name", "server_name", "media_type", "role"]),
    st.text(),
)
WORTHLESS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.just(" \n"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(labels=LABELS, more=WORTHLESS)
def test_items_without_text_are_left_out(labels: dict[str, str], more: Any) -> None:
    assert tag_of_unknown({"type": "marker", **labels, "more": more}) == LEFT_OUT


@given(text=st.text(min_size=1).filter(str.strip), depth=st.integers(0, 2 * MAX_DEPTH))
def test_text_is_found_at_any_depth(text: str, depth: int) -> None:
    value: Any = text
    for level in range(depth):
        value = [None, value] if level % 2 else {"id": "x", "part": value}
    assert tag_of_unknown({"type": "marker", "value": value}) == REFUSED
    for end in ("_call", "_call_output", "_use", "_result", "_output"):
        assert tag_of_unknown({"type": f"new{end}", "value": value}) == LEFT_OUT


@pytest.mark.parametrize("kind", sorted(DOCUMENTS))
def test_words_of_the_user_that_are_no_text_are_refused(kind: str) -> None:
    assert tag_of_unknown({"type": kind, "file_id": "f1"}) == REFUSED


@pytest.mark.parametrize("kind", sorted(PICTURES))
def test_pictures_are_left_out(kind: str) -> None:
    assert tag_of_unknown({"type": kind, "source": {"url": "https://a/b.png"}}) == LEFT_OUT
