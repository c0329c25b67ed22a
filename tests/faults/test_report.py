"""The report tells which pauses of streams a fault has drawn out."""

import pytest

from tests.faults.checker import StreamId, Tokens
from tests.faults.nemesis import Fault, Injected, Kind
from tests.faults.report import SEVERAL, p99, pauses_of


def tokens(name: str, *times_s: float) -> list[Tokens]:
    """The tokens of a stream, one at each time."""
    return [Tokens(StreamId(name, 0), n, (n,), "", time_s) for n, time_s in enumerate(times_s)]


def fault(kind: Kind, time_s: float) -> Injected:
    return Injected(Fault("rank", 0, kind, "decode"), time_s, in_phase=True)


def test_a_fault_has_one_pause_of_each_stream_and_several_within_one_are_told_apart() -> None:
    events = [
        *tokens("a", 9.9, 10.1, 13.1, 13.2, 30.0, 30.1, 39.0),
        *tokens("b", 9.9, 10.2, 11.2, 20.0),
        *tokens("c", 1.0, 2.0),
    ]
    found = pauses_of(events, [fault("kill", 10.0), fault("kill", 30.05), fault("stop 3 s", 35.0)])
    assert found["rank: kill"] == [pytest.approx(0.1), pytest.approx(1.0), pytest.approx(3.0)]
    assert found[SEVERAL] == [pytest.approx(8.9)]


def test_the_99th_percentile_is_one_of_the_pauses() -> None:
    assert p99([]) is None
    assert p99([2.0]) == 2.0
    assert p99([float(n) for n in range(1, 201)]) == 198.0
