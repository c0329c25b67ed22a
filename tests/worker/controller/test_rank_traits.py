"""The traits of a worker are those of all its ranks."""

from orcinus.v1 import worker_pb2

from services.worker.controller.rank_traits import RankTraits


def payload(**traits: str) -> bytes:
    return worker_pb2.DescribeResponse(traits=traits).SerializeToString()


def test_a_worker_has_traits_once_all_its_ranks_have_told_theirs() -> None:
    differences: list[str] = []
    traits = RankTraits(2, on_difference=differences.append)
    traits.note(1, payload(dtype="float32"))
    assert traits.all == {}
    traits.note(0, payload(dtype="float32"))
    assert traits.all == {"dtype": "float32"}
    assert not differences


def test_ranks_of_one_stage_that_do_not_fit_are_both_named() -> None:
    differences: list[str] = []
    traits = RankTraits(2, on_difference=differences.append)
    traits.note(0, payload(checkpoint="a", dtype="float32"))
    traits.note(1, payload(checkpoint="b", dtype="float32"))
    assert differences == ["ranks 0 and 1 do not fit: checkpoint is a and b"]
    assert traits.all == {}
