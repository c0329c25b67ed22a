"""Trees of conditional parts give every rendering back, and sums of them what follows."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8s.chart.conditional import combine, resolve

NONE: frozenset[str] = frozenset()
A, B = frozenset("a"), frozenset("b")

SCALARS = st.sampled_from(["x", "y", 1, 2, True])
VALUES = st.dictionaries(
    st.sampled_from("klm"),
    SCALARS
    | st.lists(
        st.fixed_dictionaries({"name": st.sampled_from("pqr"), "value": SCALARS}),
        unique_by=lambda it: it["name"],
    ),
)


def in_any_order(value: Any) -> Any:
    """Returns a value whose lists of named elements are sorted."""
    return {
        key: sorted(inner, key=lambda it: it["name"]) if isinstance(inner, list) else inner
        for key, inner in value.items()
    }


@given(none=VALUES, with_a=VALUES, with_b=VALUES, with_both=VALUES)
def test_each_rendering_comes_back(none: Any, with_a: Any, with_b: Any, with_both: Any) -> None:
    renderings = [(NONE, none), (A, with_a), (B, with_b), (A | B, with_both)]
    tree = combine(renderings)
    for components, value in renderings:
        assert in_any_order(resolve(tree, components)) == in_any_order(value)


def test_what_two_components_change_apart_is_changed_by_both() -> None:
    tree = combine(
        [
            (NONE, {"env": [{"name": "x", "value": 1}], "n": 1}),
            (A, {"env": [{"name": "x", "value": 1}, {"name": "a", "value": 2}], "n": 1}),
            (B, {"env": [{"name": "x", "value": 3}], "n": 1, "more": {}}),
        ]
    )
    assert resolve(tree, A | B) == {
        "env": [{"name": "x", "value": 3}, {"name": "a", "value": 2}],
        "n": 1,
        "more": {},
    }


def test_of_two_components_that_change_one_place_the_later_wins() -> None:
    tree = combine([(NONE, {"n": 1}), (A, {"n": 2}), (B, {"n": 3})])
    assert resolve(tree, A | B) == {"n": 3}


@pytest.mark.parametrize("kept", [["x", "y"], ["y"]])
def test_elements_that_a_component_removes_are_gone(kept: list[str]) -> None:
    tree = combine([(NONE, {"it": ["x", "y", "z"]}), (A, {"it": kept})])
    assert resolve(tree, A) == {"it": kept}
    assert resolve(tree, B) == {"it": ["x", "y", "z"]}
