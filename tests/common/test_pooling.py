"""How workers tell what they make of a prompt."""

import json

from services.common.pooling import TRAIT, Pooling, pooling_in


def test_traits_tell_how_workers_pool() -> None:
    pooling = Pooling(kind="mean", n_values=8, answer_token_ids=(3, 4), generates=True)
    assert pooling_in(pooling.to_traits()) == pooling
    assert pooling_in({}) is None


def test_a_way_of_a_later_version_makes_no_vectors_here() -> None:
    record = json.loads(Pooling(kind="mean", n_values=8).to_traits()[TRAIT])
    assert pooling_in({TRAIT: json.dumps({**record, "later": 1})}) is None


def test_what_an_earlier_version_does_not_tell_has_its_default() -> None:
    told = {"kind": "last", "n_values": 8, "answer_token_ids": []}
    assert pooling_in({TRAIT: json.dumps(told)}) == Pooling(kind="last", n_values=8)
