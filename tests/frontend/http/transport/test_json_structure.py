"""The structure of large bodies is counted exactly where it matters, and bounded."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import errors
from services.frontend.http.transport import json_structure
from services.frontend.http.transport.json_structure import (
    FREE_BYTES,
    MAX_CONTAINERS,
    MAX_STRINGS,
    MAX_VALUES,
    StructureCount,
)
from services.frontend.request.refusals import Refusal, Refusals


def count(data: bytes, *, piece_bytes: int = 2**16, refusals: Refusals | None = None) -> None:
    structure = StructureCount(Refusals() if refusals is None else refusals)
    for start in range(0, len(data), piece_bytes):
        structure.add(data[start : start + piece_bytes])


def check(data: bytes) -> None:
    count(data + b" " * FREE_BYTES)


def listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (listed(b"[]", MAX_CONTAINERS), "objects and arrays"),
        (listed(b"{}", MAX_CONTAINERS), "objects and arrays"),
        (listed(b'"a,"', MAX_STRINGS + 1), "strings"),
        (listed(b'{"":"","":""}', MAX_CONTAINERS - 1)[:-1] + b',"","","","",""]', "strings"),
        (listed(b"7", MAX_VALUES + 1), "values"),
        (b'["\\\\",' + listed(b"[]", MAX_CONTAINERS), "objects and arrays"),
        (b'["\\\\\\",' + b'",' + listed(b"[]", MAX_CONTAINERS), "objects and arrays"),
        (b'["' + b"," * MAX_VALUES + b'",' + listed(b"[]", MAX_CONTAINERS), "objects and arrays"),
    ],
    ids=["arrays", "objects", "texts", "names", "tokens", "escape", "quote", "behind a text"],
)
def test_too_much_structure_is_refused(data: bytes, limit: str) -> None:
    with pytest.raises(errors.TooLarge, match=limit):
        check(data)


@pytest.mark.parametrize(
    "data",
    [
        listed(b"70000", MAX_VALUES),
        listed(b"[]", MAX_CONTAINERS - 1),
        listed(b'"x"', MAX_STRINGS),
        json.dumps({"prompt": '[{"a,b": ["c\\"]}], ' * 100_000}).encode(),
        json.dumps({"prompt": '\\"' * 100_000}).encode(),
    ],
    ids=["a million tokens", "arrays", "texts", "a text like JSON", "a text of escapes"],
)
def test_structure_within_the_limits_is_taken(data: bytes) -> None:
    check(data)


def test_small_body_may_have_any_structure() -> None:
    count(b"[" * FREE_BYTES)


def test_refusal_is_counted() -> None:
    refusals = Refusals()
    with pytest.raises(errors.TooLarge):
        count(b"[" * (FREE_BYTES + 1), refusals=refusals)
    assert refusals[Refusal.BODY_TOO_LARGE] == 1


def test_body_is_refused_before_all_of_it_has_come() -> None:
    structure = StructureCount(Refusals())
    structure.add(b"[" * FREE_BYTES)
    with pytest.raises(errors.TooLarge):
        structure.add(b"[")


texts = st.text(st.sampled_from('a\\",[]{}:\n'), max_size=12)
values = st.recursive(
    st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def counts(value: Any) -> tuple[int, int]:
    """The containers and the strings of a value."""
    if isinstance(value, str):
        return 0, 1
    if not isinstance(value, list | dict):
        return 0, 0
    items = [*value, *value.values()] if isinstance(value, dict) else value
    parts = [counts(item) for item in items]
    return 1 + sum(part[0] for part in parts), sum(part[1] for part in parts)


@given(values, st.integers(min_value=1, max_value=40))
def test_what_is_counted_is_what_is_there(value: Any, piece_bytes: int) -> None:
    n_containers, n_strings = counts(value)
    limits = {"FREE_BYTES": 0, "MAX_CONTAINERS": n_containers, "MAX_STRINGS": n_strings}
    data = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(json_structure, name, limit)
        count(data, piece_bytes=piece_bytes)
        for name in ("MAX_CONTAINERS", "MAX_STRINGS"):
            if limits[name]:
                with pytest.MonkeyPatch.context() as tighter:
                    tighter.setattr(json_structure, name, limits[name] - 1)
                    with pytest.raises(errors.TooLarge):
                        count(data, piece_bytes=piece_bytes)
