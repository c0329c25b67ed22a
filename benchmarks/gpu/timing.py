"""Timing of calls on a device, with and without the host's time to launch kernels.

On a GPU, calls are recorded into a CUDA graph, and events time the replays, because a launch from
Python takes longer than many kernels. A call that waits for the device cannot be recorded; its time
includes the host's part. On a CPU a single wall clock times everything.

The caller gives one call for each of several sets of inputs. The calls run in turn, so that inputs
larger than the cache come from memory, as between the layers of a model. For the same reason each
recorded call has its own memory for the result.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

N_CALLS = 24
"""Smallest number of calls in a CUDA graph."""
MIN_TIMED_S = 2e-3
"""Smallest duration, in seconds, of the graph replays between two events. The launch of the first
replay, while the device is idle, takes a hundredth of this time or less."""
MAX_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one call, as medians in seconds. `device_s` leaves out launches if
    `is_graph`."""

    device_s: float
    call_s: float
    """Seconds per call with its launch from Python, when many calls follow each other."""
    is_graph: bool


class Timer:
    """Measures the time of calls on one device; each measurement takes about `budget_s` seconds."""

    def __init__(self, device: torch.device, *, budget_s: float) -> None:
        self.device = device
        self._budget_s = budget_s
        self._min_rounds = 3 if device.type == "cuda" else 1

    def time(self, calls: Sequence[Call], *, is_capturable: bool = True) -> Timing:
        """Runs `calls` in turn, several times, and returns the median times of one call."""
        calls[0]()  # compiles kernels
        self.synchronize()
        if self.device.type != "cuda":
            call_s = self._repeat(lambda: _run(calls), self._wall_s) / len(calls)
            return Timing(call_s, call_s, is_graph=False)
        rounds = list(calls) * -(-N_CALLS // len(calls))
        call_s = self._repeat(lambda: _run(rounds), self._wall_s) / len(rounds)
        graph = _captured(rounds) if is_capturable else None
        if graph is None:
            device_s = self._repeat(lambda: _run(rounds), self._event_s) / len(rounds)
            return Timing(device_s, call_s, is_graph=False)
        replays = [graph.replay] * math.ceil(MIN_TIMED_S / self._event_s(graph.replay))
        device_s = self._repeat(lambda: _run(replays), self._event_s) / len(replays) / len(rounds)
        return Timing(device_s, call_s, is_graph=True)

    def synchronize(self) -> None:
        """Waits until the device has done all queued work. Does nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _repeat(self, work: Call, clock: Callable[[Call], float]) -> float:
        first_s = clock(work)
        n_rounds = min(MAX_ROUNDS, max(self._min_rounds, int(self._budget_s / max(first_s, 1e-9))))
        return statistics.median(clock(work) for _ in range(n_rounds))

    def _wall_s(self, work: Call) -> float:
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def _event_s(self, work: Call) -> float:
        start, end = device_event(), device_event()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """Returns a CUDA graph of all calls. Returns None if a call waits for the device, which a graph
    cannot record."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = [call() for call in calls]  # kept, so that all calls have separate memory
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    del results
    graph.replay()
    return graph


def device_event() -> torch.cuda.Event:
    """Returns a new CUDA event that records the time at which the device reaches it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
