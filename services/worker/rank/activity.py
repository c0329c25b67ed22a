"""The steps of a rank's main thread, and the time that each step may take.

The main thread records each step that it begins, and another thread (`rank.lifeline`) measures the
time. So a main thread that hangs is detected within its own process: no other process can tell
whether the thread computes or waits for other ranks. Computing has a time limit. A wait for other
ranks has none while the epoch lasts, because it is not an error of this rank.
"""

import sys
from dataclasses import dataclass

from services.common.iteration_limit import IterationLimit, IterationSize

JOIN_LIMIT_S = 60.0
"""Timeout in seconds for a rank to join an epoch: `membership.JOIN_TIMEOUT_S`, and time to allocate
memory for keys and values."""

PROFILE_LIMIT_S = 300.0
"""Timeout in seconds for starting a profile, and for writing it."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step of the main thread, with a name and a time limit."""

    name: str
    limit_s: float | None = None
    """Seconds that the step may take. If None, the limit follows from `work` or `epoch`. If these
    are None too, there is no limit."""
    work: IterationSize | None = None
    """The size of the iteration that the step computes. The time limit depends on this size."""
    epoch: int | None = None
    """The epoch whose other ranks the step waits for. When the epoch is over, the step must end."""


class Activity:
    """Holds the current step of a rank's main thread, and gives the time limits of steps."""

    def __init__(self, limit: IterationLimit | None = None) -> None:
        """`limit` gives the time limits of steps. If it is None, no step has a limit."""
        self._limit = limit or IterationLimit(floor_s=float("inf"), ceiling_s=float("inf"))
        self.step = Step("loads")
        """The current step; other threads may read it."""

    @property
    def floor_s(self) -> float:
        """Seconds allowed for a step that should take almost no time, such as one pass of the
        rank's loop."""
        return self._limit.floor_s

    def turn(self) -> None:
        """Records that a new pass of the rank's loop begins. Every wait in a pass is short."""
        self.step = Step("turns", self.floor_s)

    def join(self, epoch: int) -> None:
        """Records that the rank begins to join an epoch. Joining has a time limit of its own."""
        self.step = Step(f"joins epoch {epoch}", max(JOIN_LIMIT_S, self.floor_s))

    def profile(self) -> None:
        """Records that the rank starts or writes a profile."""
        self.step = Step("profiles", max(PROFILE_LIMIT_S, self.floor_s))

    def compute(self, iteration: int, work: IterationSize) -> None:
        """Records that the thread computes an iteration. A repeated call for the current iteration
        does not restart the time of the step."""
        name = f"computes iteration {iteration}"
        if self.step.name != name:
            self.step = Step(name, work=work)

    def exchange(self, iteration: int, epoch: int) -> None:
        """Records that the thread receives or sends activations of an iteration. A repeated call
        for the current iteration does not restart the time of the step."""
        name = f"exchanges iteration {iteration}"
        if self.step.name != name:
            self.step = Step(name, epoch=epoch)

    def limit_s(self, step: Step) -> float | None:
        """Returns the time limit of a step in seconds, as long as the step's epoch lasts. Returns
        None if there is no limit. May be called from any thread."""
        return step.limit_s if step.work is None else self._limit.of(step.work)

    def computed(self, work: IterationSize, elapsed_s: float) -> None:
        """Records how long an iteration took, from which the time limits of later iterations are
        derived."""
        self._limit.learn(work, elapsed_s)


class StepTimer:
    """Measures the time that the main thread has spent in its current step. Only one thread, the
    lifeline, uses the timer."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._step = activity.step
        self._spent_s = 0.0
        self._first_epoch = 0  # the epochs before this one are over

    def end_epochs_before(self, epoch: int | None) -> None:
        """Records that all epochs before `epoch` are over, or all epochs if None. A step that waits
        for ranks of such an epoch must then end within `Activity.floor_s` seconds."""
        self._first_epoch = max(self._first_epoch, sys.maxsize if epoch is None else epoch)
        self._spent_s = 0.0

    def add(self, elapsed_s: float) -> str | None:
        """Adds `elapsed_s` seconds, in which the process has run, to the time of the current step.
        If the step has taken longer than its limit, returns a text that names the step and the
        limit. Otherwise returns None."""
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
