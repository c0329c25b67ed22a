"""The steps of a rank's main thread, and the time that each may take.

The main thread says what it begins; another thread (`rank.lifeline`) counts how long that takes. So
a main thread that stands is found by its own process, which alone knows whether it computes, whose
time is limited, or waits for other ranks, which is the fault of none of its own until their epoch
is over.
"""

import sys
from dataclasses import dataclass

from services.common.iteration_limit import IterationLimit, IterationSize

JOIN_LIMIT_S = 60.0
"""Time to join an epoch; more than `membership.JOIN_TIMEOUT_S` and what it takes to set memory for
keys and values aside."""

PROFILE_LIMIT_S = 300.0
"""Time to begin a profile, or to write one."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One activity of the main thread, with a name and a limit."""

    name: str
    limit_s: float | None = None
    """Seconds it may take; None: as long as it takes, but for the next two."""
    work: IterationSize | None = None
    """The iteration that it computes, if it does, whose limit depends on how large it is."""
    epoch: int | None = None
    """The epoch for whose other ranks it waits, if it does; it must end when that is over."""


class Activity:
    """The step that the main thread is in, which begins one after the other."""

    def __init__(self, limit: IterationLimit | None = None) -> None:
        """Without a limit nothing is limited."""
        self._limit = limit or IterationLimit(floor_s=float("inf"), ceiling_s=float("inf"))
        self.step = Step("loads")
        """The current step; other threads may read it."""

    @property
    def floor_s(self) -> float:
        """Seconds allowed for a step that should take almost no time."""
        return self._limit.floor_s

    def turn(self) -> None:
        """Begins a turn of the loop, which waits for nothing for long."""
        self.step = Step("turns", self.floor_s)

    def join(self, epoch: int) -> None:
        """Begins to join an epoch, whose waits have limits of their own."""
        self.step = Step(f"joins epoch {epoch}", max(JOIN_LIMIT_S, self.floor_s))

    def profile(self) -> None:
        """Begins to start, or to write, a profile."""
        self.step = Step("profiles", max(PROFILE_LIMIT_S, self.floor_s))

    def compute(self, iteration: int, work: IterationSize) -> None:
        """Begins to compute an iteration, or goes on with it."""
        name = f"computes iteration {iteration}"
        if self.step.name != name:
            self.step = Step(name, work=work)

    def exchange(self, iteration: int, epoch: int) -> None:
        """Begins to wait for the activations of an iteration to come, or to be taken."""
        name = f"exchanges iteration {iteration}"
        if self.step.name != name:
            self.step = Step(name, epoch=epoch)

    def limit_s(self, step: Step) -> float | None:
        """Returns the seconds that a step may take while its epoch lasts; from any thread."""
        return step.limit_s if step.work is None else self._limit.of(step.work)

    def computed(self, work: IterationSize, elapsed_s: float) -> None:
        """Records how long an iteration took, from which later limits are learned."""
        self._limit.learn(work, elapsed_s)


class StepTimer:
    """Counts how long the main thread has been in its step; for one other thread."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._step = activity.step
        self._spent_s = 0.0
        self._first_epoch = 0  # the epochs before this one are over

    def end_epochs_before(self, epoch: int | None) -> None:
        """Notes that epochs are over, or all epochs if None: what waits for their ranks must stop
        now."""
        self._first_epoch = max(self._first_epoch, sys.maxsize if epoch is None else epoch)
        self._spent_s = 0.0

    def add(self, elapsed_s: float) -> str | None:
        """Adds time in which the process has run, and returns the reason if the step takes too
        long."""
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
