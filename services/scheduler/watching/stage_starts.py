"""When each stage began an iteration, concluded from the durations that stages report.

The clocks of other machines are not read. A stage begins when the stage before it has sent its
activations and the stage itself is done with the iteration before; the first stage begins when the
plan is sent. A first pass goes from front to back by this rule. The result came when the last stage
was done, so a second pass, from back to front, makes no stage begin later than the stages after it
allow. The time that plans and results took on their way counts as time after the last stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTime:
    """The times of one stage in one iteration, in nanoseconds."""

    compute_ns: int
    send_ns: int


class StageStarts:
    """The stages of one epoch, and when each ended its last iteration."""

    def __init__(self, n_stages: int) -> None:
        self._done_ns = [0] * n_stages

    def starts(self, sent_ns: int, round_trip_ns: int, times: Sequence[StageTime]) -> list[int]:
        """Returns when each stage began to compute, in nanoseconds since the plan was sent.

        The plan was sent at `sent_ns`. Iterations must come in their order.
        """
        starts: list[int] = []
        ready_ns = 0
        for done_ns, stage in zip(self._done_ns, times, strict=True):
            start_ns = max(ready_ns, done_ns - sent_ns)
            starts.append(start_ns)
            ready_ns = start_ns + stage.compute_ns + stage.send_ns
        latest_ns = round_trip_ns
        for index in range(len(times) - 1, -1, -1):
            is_last = index == len(times) - 1
            latest_ns -= times[index].compute_ns + (0 if is_last else times[index].send_ns)
            latest_ns = starts[index] = max(0, min(starts[index], latest_ns))
        for index, stage in enumerate(times):
            self._done_ns[index] = sent_ns + starts[index] + stage.compute_ns
        return starts
