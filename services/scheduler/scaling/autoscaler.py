"""The autoscaler of a leader: it measures the load, and sets the number of workers.

The number of workers is the number of wanted pipelines times the number of stages, plus the spares.
At first the autoscaler takes over the number that it finds, so that a change of the leader changes
nothing. Later it sets the number again if something else has changed it. Calls that fail are logged
and tried again, with growing pauses; meanwhile the pipelines serve with the workers that there are.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from services.common.outage_log import OutageLog
from services.scheduler.cluster.replicas import ReplicaStore, ReplicasUnavailable
from services.scheduler.scaling.load import Load
from services.scheduler.scaling.size import Size, SizeLimits, resize

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two measurements of the load."""

READ_S = 30.0
"""Seconds after which the number of workers is read again, because other programs may have changed
it."""

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Smallest and largest number of seconds between a call that failed and the next one."""


class Autoscaler:
    """Keeps the number of workers equal to the number that the load requires."""

    def __init__(
        self,
        store: ReplicaStore,
        limits: SizeLimits,
        *,
        n_stages: int,
        n_spare_workers: int,
        measure: Callable[[float], Load],
        on_wanted: Callable[[int], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measure` returns the load at a time of `clock`. `on_wanted` is called with the wanted
        number of pipelines after each measurement."""
        self._store = store
        self._limits = limits
        self._n_stages = n_stages
        self._n_spare_workers = n_spare_workers
        self._measure = measure
        self._on_wanted = on_wanted
        self._clock = clock
        self._size: Size | None = None
        self._n_workers: int | None = None  # as the store has it; None if that is not known
        self._read_at = 0.0
        self._call_at = 0.0  # time of the next call after one that failed
        self._pause_s = FIRST_PAUSE_S
        self._outage = OutageLog(
            log,
            failing="the number of workers cannot be set",
            works="the number of workers can be set again",
            counted="attempts failed",
        )

    @property
    def is_asleep(self) -> bool:
        """Whether the wanted number of pipelines is 0. False before the number of workers has been
        read."""
        return self._size is not None and self._size.n_pipelines == 0

    async def run(self) -> None:
        """Keeps the number of workers equal to the number that the load requires, until
        cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Measures the load once, and sets the number of workers if it has to change."""
        now = self._clock()
        if now >= self._call_at and (self._n_workers is None or now - self._read_at >= READ_S):
            await self._read(now)
        if self._size is None:
            return
        self._resize(self._size, now)
        if now >= self._call_at and self._n_workers not in (None, self._n_wanted_workers()):
            await self._write(now)

    def _resize(self, size: Size, now: float) -> None:
        self._size = after = resize(size, self._measure(now), self._limits, now)
        if after.n_pipelines != size.n_pipelines:
            log.info(
                "%d pipelines are wanted instead of %d, with %d workers: %s",
                after.n_pipelines,
                size.n_pipelines,
                self._n_wanted_workers(),
                after.reason,
            )
        self._on_wanted(after.n_pipelines)

    def _n_wanted_workers(self) -> int:
        """Returns the wanted number of workers: one for each stage of each wanted pipeline, plus
        the spares. Returns 0 if no pipeline is wanted."""
        if self._size is None or self._size.n_pipelines == 0:
            return 0
        return self._size.n_pipelines * self._n_stages + self._n_spare_workers

    async def _read(self, now: float) -> None:
        try:
            self._n_workers = await self._store.read()
        except ReplicasUnavailable as error:
            self._note_failure(error, now)
            return
        self._note_success(now)
        if self._size is None:
            n_staged = max(0, self._n_workers - self._n_spare_workers)
            n_pipelines = self._limits.clamp(n_staged // self._n_stages)
            self._size = Size(n_pipelines=n_pipelines, changed_at=now)
        n_wanted = self._n_wanted_workers()
        if self._n_workers != n_wanted:
            log.info("the number of workers is %d, and is set to %d", self._n_workers, n_wanted)

    async def _write(self, now: float) -> None:
        n_workers = self._n_wanted_workers()
        try:
            await self._store.write(n_workers)
        except ReplicasUnavailable as error:
            self._note_failure(error, now)
            return
        self._note_success(now)
        self._n_workers = n_workers

    def _note_success(self, now: float) -> None:
        self._read_at, self._pause_s = now, FIRST_PAUSE_S
        self._outage.worked()

    def _note_failure(self, error: ReplicasUnavailable, now: float) -> None:
        """Notes that a call has failed. The call may have had an effect, so the number is read
        again."""
        self._n_workers = None
        self._call_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._outage.failed(error)
