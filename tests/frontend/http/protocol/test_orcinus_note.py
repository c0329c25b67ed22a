"""The note of several answers says what is known of all their values."""

import itertools

import pytest

from services.frontend.http.protocol.orcinus_note import note_of


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((True, True), {"orcinus": {"schema_valid": True}}),
        ((True, None), {}),
        ((True, False), {"orcinus": {"schema_valid": False}}),
        ((True, None, False), {"orcinus": {"schema_valid": False}}),
    ],
)
def test_a_value_that_does_not_match_is_told_though_another_could_not_be_checked(
    verdicts: tuple[bool | None, ...], expected: dict[str, object]
) -> None:
    for order in itertools.permutations(verdicts):
        assert note_of(order) == expected
