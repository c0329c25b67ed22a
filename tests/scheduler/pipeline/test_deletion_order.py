"""Which workers should go first when their number is reduced."""

from orcinus.v1 import worker_pb2

from services.scheduler.pipeline.deletion_order import costs_of
from services.scheduler.pipeline.membership import Member, Pipeline


def pipeline(number: int, *addresses: str) -> Pipeline:
    members = tuple(Member(address, worker_pb2.DescribeResponse()) for address in addresses)
    return Pipeline("p", number + 1, members, number)


def test_spares_go_first_then_what_drains_and_then_the_last_pipeline() -> None:
    serving = [pipeline(0, "a", "b"), pipeline(1, "c", "d"), pipeline(2, "e", "f")]
    costs = costs_of(serving, [serving[0]])
    assert costs["a"] == costs["b"] > 0
    assert sorted(costs, key=costs.__getitem__) == ["a", "b", "e", "f", "c", "d"]
    assert len(set(costs.values())) == 3
    many = [pipeline(number, str(number)) for number in range(2000)]
    assert min(costs_of(many, many[:1]).values()) == costs_of(many, many[:1])["0"] > 0
