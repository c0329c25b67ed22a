"""The rule by which the number of pipelines follows the load.

More pipelines are wanted as soon as the requests in the queue would wait longer than
`queue_goal_s`. The wanted number is then the number that works off the queue in that time. It does
not rise for this reason while earlier pipelines are still starting, because the queue grows
meanwhile in any case.

Fewer pipelines are wanted when fewer would have been enough for `scale_down_after_s` seconds,
counted from the last change at the earliest. Fewer are enough only with some room to spare: the
queue must be worked off in half of `queue_goal_s`, and the pipelines must be no fuller than
`MAX_FULL`. So the number does not alternate while the load stays the same.

A model that may sleep has no pipelines after `sleep_after_s` without a request, and one as soon as
there is a request. The rule is a function of times and numbers that the caller gives.
"""

import math
from dataclasses import dataclass, replace

from services.scheduler.scaling.load import Load

MAX_FULL = 0.7
"""Largest part of the capacity of the remaining pipelines that may be in use after a reduction,
from 0 to 1."""

QUIET = 0.5
"""After a reduction of the pipelines, the forecast time for all waiting requests to begin must be
at most this part of `queue_goal_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimits:
    """The limits and times of the rule that sets the number of pipelines. `SchedulerSettings`
    explains each field."""

    min_pipelines: int
    max_pipelines: int
    queue_goal_s: float
    scale_down_after_s: float
    sleep_after_s: float

    @property
    def may_sleep(self) -> bool:
        """Whether there may be no pipelines at all."""
        return self.min_pipelines == 0

    def clamp(self, n_pipelines: int) -> int:
        """Returns the number within the limits that is nearest to `n_pipelines`."""
        return min(max(n_pipelines, self.min_pipelines), self.max_pipelines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The wanted number of pipelines, and the times that the rule needs at the next measurement."""

    n_pipelines: int
    changed_at: float
    """Time of the last change of the number of pipelines."""
    reason: str = ""
    """Reason for the last change of the number, as text."""
    idle_since: float | None = None
    """Time since which there are no requests; None if there are some."""
    enough_since: float | None = None
    """Time since which fewer pipelines would have been enough; None if fewer would not be enough
    now."""
    n_enough: int = 0
    """Largest number of pipelines that was needed since `enough_since`."""


def resize(size: Size, load: Load, limits: SizeLimits, now: float) -> Size:
    """Returns the wanted number of pipelines after the load `load` was measured at the time `now`,
    in seconds. Times must not decrease from call to call."""
    idle_since = (now if size.idle_since is None else size.idle_since) if load.is_idle else None
    size = replace(size, idle_since=idle_since)
    n_needed, reason = _needed(size, load, limits)
    if n_needed > size.n_pipelines:
        return _changed(size, n_needed, reason, now)
    if size.n_pipelines and _may_sleep(size, load, limits, now):
        return _changed(size, 0, f"there was no request for {limits.sleep_after_s:g} s", now)
    return _reduced(size, _enough(load, limits), limits, now)


def _reduced(size: Size, n_enough: int, limits: SizeLimits, now: float) -> Size:
    """Returns the size after a measurement of the load showed that `n_enough` pipelines are
    enough."""
    if n_enough >= size.n_pipelines:
        return replace(size, enough_since=None, n_enough=0)
    since = now if size.enough_since is None else size.enough_since
    n_enough = max(size.n_enough, n_enough)
    if now - max(since, size.changed_at) < limits.scale_down_after_s:
        return replace(size, enough_since=since, n_enough=n_enough)
    reason = f"{n_enough} would have been enough for {limits.scale_down_after_s:g} s"
    return _changed(size, n_enough, reason, now)


def _changed(size: Size, n_pipelines: int, reason: str, now: float) -> Size:
    return Size(n_pipelines=n_pipelines, changed_at=now, reason=reason, idle_since=size.idle_since)


def _needed(size: Size, load: Load, limits: SizeLimits) -> tuple[int, str]:
    """Returns the number of pipelines that the load needs, and the reason. Returns the present
    number of `size` if the load does not need more."""
    least = _least(load, limits)
    if size.n_pipelines < least:
        return least, _why_least(load, limits)
    is_starting = load.n_serving < size.n_pipelines
    if is_starting or load.queue_s <= limits.queue_goal_s:
        return size.n_pipelines, ""
    return _for_queue(load, limits.queue_goal_s, limits), (
        f"{load.n_waiting} requests with {load.n_queued_tokens:,.0f} tokens wait, and the last "
        f"would begin in {load.queue_s:.1f} s, which is more than {limits.queue_goal_s:g} s"
    )


def _least(load: Load, limits: SizeLimits) -> int:
    """Returns the smallest number of pipelines with which every request can be served."""
    needs_one = not load.is_idle or not load.is_known
    return limits.clamp(1 if needs_one else 0)


def _why_least(load: Load, limits: SizeLimits) -> str:
    if limits.min_pipelines:
        return f"there are to be at least {limits.min_pipelines}"
    if load.is_idle:
        return "no pipeline has served yet, so frontends do not know the model"
    return f"{load.n_waiting + load.n_held} requests wait for a model that is asleep"


def _may_sleep(size: Size, load: Load, limits: SizeLimits, now: float) -> bool:
    if _least(load, limits) or size.idle_since is None:
        return False
    return now - max(size.idle_since, size.changed_at) >= limits.sleep_after_s


def _enough(load: Load, limits: SizeLimits) -> int:
    """Returns the number of pipelines, at least 1, that would be enough for the load, with room to
    spare."""
    n_for_queue = _for_queue(load, QUIET * limits.queue_goal_s, limits)
    return limits.clamp(max(1, n_for_queue, math.ceil(load.used / MAX_FULL)))


def _for_queue(load: Load, goal_s: float, limits: SizeLimits) -> int:
    """Returns the number of pipelines, within the limits, that work off the queue within `goal_s`
    seconds."""
    needed = load.n_serving * load.queue_s / goal_s
    return limits.clamp(math.ceil(min(needed, limits.max_pipelines)))
