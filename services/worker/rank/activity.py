"""The steps of a rank's main thread, and the time that each step may take.

The main thread records each step that it begins, and another thread (`rank.lifeline`) measures the
time. A main thread that hangs is thus detected within its own process. Only this process knows
whether the thread computes, for which there is a limit, or waits for other ranks. Such a wait is no
fault of this rank until the epoch is over.
"""

import sys
from dataclasses import dataclass

from services.common.iteration_limit import IterationLimit, IterationSize

JOIN_LIMIT_S = 60.0
"""Seconds in which a rank must join an epoch: `membership.JOIN_TIMEOUT_S`, and time to allocate
memory for keys and values."""

PROFILE_LIMIT_S = 300.0
"""Seconds in which a profile must be started, or written."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step of the main thread, with a name and a time limit."""

    name: str
    limit_s: float | None = None
    """Seconds that the step may take. If None, `work` or `epoch` decides, or there is no limit."""
    work: IterationSize | None = None
    """The size of the iteration that the step computes; the limit depends on the size."""
    epoch: int | None = None
    """The epoch for whose other ranks the step waits. When the epoch is over, the step must end."""


class Activity:
    """The current step of the main thread."""

    def __init__(self, limit: IterationLimit | None = None) -> None:
        """If `limit` is None, no step has a limit."""
        self._limit = limit or IterationLimit(floor_s=float("inf"), ceiling_s=float("inf"))
        self.step = Step("loads")
        """The current step; other threads may read it."""

    @property
    def floor_s(self) -> float:
        """Seconds allowed for a step that should take almost no time."""
        return self._limit.floor_s

    def turn(self) -> None:
        """Begins a turn of the loop, in which every wait is short."""
        self.step = Step("turns", self.floor_s)

    def join(self, epoch: int) -> None:
        """Notes that the rank begins to join an epoch. Joining has a time limit of its own."""
        self.step = Step(f"joins epoch {epoch}", max(JOIN_LIMIT_S, self.floor_s))

    def profile(self) -> None:
        """Begins to start, or to write, a profile."""
        self.step = Step("profiles", max(PROFILE_LIMIT_S, self.floor_s))

    def compute(self, iteration: int, work: IterationSize) -> None:
        """Notes that the thread computes an iteration. If this is the current step already, the
        step is not begun again, so its time is not reset."""
        name = f"computes iteration {iteration}"
        if self.step.name != name:
            self.step = Step(name, work=work)

    def exchange(self, iteration: int, epoch: int) -> None:
        """Notes that the thread receives or sends activations of an iteration. If this is the
        current step already, the step is not begun again, so its time is not reset."""
        name = f"exchanges iteration {iteration}"
        if self.step.name != name:
            self.step = Step(name, epoch=epoch)

    def limit_s(self, step: Step) -> float | None:
        """Returns the seconds that a step may take while its epoch lasts. Returns None if there is
        no limit. May be called from any thread."""
        return step.limit_s if step.work is None else self._limit.of(step.work)

    def computed(self, work: IterationSize, elapsed_s: float) -> None:
        """Records the time of an iteration, from which the limits of later ones are learned."""
        self._limit.learn(work, elapsed_s)


class StepTimer:
    """Measures the time that the main thread has spent in its current step. One other thread uses
    the timer."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._step = activity.step
        self._spent_s = 0.0
        self._first_epoch = 0  # the epochs before this one are over

    def end_epochs_before(self, epoch: int | None) -> None:
        """Notes that all epochs before `epoch` are over, or all epochs if None. A step that waits
        for ranks of such an epoch must end soon."""
        self._first_epoch = max(self._first_epoch, sys.maxsize if epoch is None else epoch)
        self._spent_s = 0.0

    def add(self, elapsed_s: float) -> str | None:
        """Adds time in which the process has run. Returns the reason as text if the current step
        has taken too long, otherwise None."""
        step = self._activity.step
        if step is not self._step:
            self._step, self._spent_s = step, 0.0
            return None
        self._spent_s += elapsed_s
        limit_s = self._activity.limit_s(step)
        if step.epoch is not None and step.epoch < self._first_epoch:
            limit_s = self._activity.floor_s
        if limit_s is None or self._spent_s <= limit_s:
            return None
        return f"it hangs: it {step.name} for more than {limit_s:.1f} s"
