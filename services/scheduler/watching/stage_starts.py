"""Computes when each stage began an iteration, from the durations that stages report.

The clocks of other machines are not read. A stage begins when the stage before has sent the
activations and the stage itself has finished the last iteration; the first stage begins when the
plan is sent. A first pass computes starts by this rule, from the first stage to the last. The
result came when the last stage was done. So a second pass, from the last stage to the first, moves
a start earlier if the stages after it could not have finished in time otherwise. The time that
plans and results travelled counts as time after the last stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTime:
    """The times of one stage in one iteration, in nanoseconds."""

    compute_ns: int
    send_ns: int


class StageStarts:
    """Computes when each stage of one epoch began its iterations. Keeps when each stage ended its
    last one."""

    def __init__(self, n_stages: int) -> None:
        self._done_ns = [0] * n_stages

    def starts(self, sent_ns: int, round_trip_ns: int, times: Sequence[StageTime]) -> list[int]:
        """Returns when each stage began to compute, in nanoseconds since the plan was sent.

        The plan was sent at `sent_ns`. Calls must be made in the order of iterations.
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
