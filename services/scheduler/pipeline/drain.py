"""The drain of a pipeline, which begins when one of its workers is asked to stop.

If there are other pipelines, the draining pipeline admits no new requests, and serves its own
requests until they have ended or moved to other pipelines. Shortly before the first of its workers
must end, all remaining requests move at once.
"""

import asyncio
import logging
from collections.abc import Callable

from services.scheduler.pipeline.membership import Pipeline

log = logging.getLogger(__name__)

MARGIN_S = 3.0
"""Seconds before the end of a worker at which the last requests of its pipeline move. The batches
in flight have to return in this time."""


class Drain:
    """Notes which workers of a pipeline are leaving, and sets timers for the end of the
    pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        on_leaving: Callable[[frozenset[str]], None],
        on_last: Callable[[], None],
    ) -> None:
        """`on_leaving` is called each time that another worker begins to leave, with the addresses
        of all leaving workers. `on_last` is called `MARGIN_S` seconds before a leaving worker must
        end."""
        self._pipeline = pipeline
        self._on_leaving = on_leaving
        self._on_last = on_last
        self._leaving: frozenset[str] = frozenset()
        self._timers: list[asyncio.TimerHandle] = []

    def note(self, stage_index: int, leaves_in_s: float) -> None:
        """Notes that the worker of a stage is leaving, and ends within `leaves_in_s` seconds. Does
        nothing if the worker is known to be leaving."""
        address = self._pipeline.members[stage_index].address
        if address in self._leaving:
            return
        self._leaving |= {address}
        log.info(
            "epoch %d drains: stage %d at %s is leaving, within %.0f s",
            self._pipeline.epoch,
            stage_index,
            address,
            leaves_in_s,
        )
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(max(0.0, leaves_in_s - MARGIN_S), self._on_last))
        self._on_leaving(self._leaving)

    def close(self) -> None:
        """Cancels the timers. Called when the pipeline has ended."""
        for timer in self._timers:
            timer.cancel()
