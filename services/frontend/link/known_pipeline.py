"""The pipeline as a frontend knows it: the one that serves, or the last one that did, and those who
wait for the next.

Points in time are those of the event loop's clock.
"""

import asyncio
import math

from services.common import errors
from services.frontend.request.pipeline import Pipeline

STOPPING = "the server is stopping"
NO_PIPELINE = "no pipeline at the moment; try again"


class KnownPipeline:
    """Keeps the pipeline that serves, or served last, and wakes those who wait for a change."""

    def __init__(self) -> None:
        self.current: Pipeline | None = None
        """The pipeline that serves, if there is one."""
        self.is_stopping = False
        """Whether this process takes no more requests."""
        self._last: Pipeline | None = None
        self._last_open = -math.inf
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether there is a pipeline, so that requests are sent at once."""
        return self.current is not None

    @property
    def last(self) -> Pipeline:
        """The pipeline that serves, or the last one that did.

        Raises:
            Unavailable: no pipeline was ever there, or this process is stopping.
        """
        if self.is_stopping:
            raise errors.Unavailable(STOPPING)
        if self._last is None:
            raise errors.Unavailable(NO_PIPELINE)
        return self._last

    @property
    def last_model(self) -> str:
        """Name of the model that is served, or was; empty before the first pipeline."""
        return "" if self._last is None else self._last.model

    def was(self, pipeline: Pipeline) -> bool:
        """Returns whether this is the pipeline that serves, or the last one that did."""
        return pipeline == self._last

    def hold_deadline(self, hold_s: float) -> float:
        """Returns the time until which, if nothing changes, requests that are held for `hold_s`
        should come.

        With a pipeline there is no end to it. After a pipeline was lost it is `hold_s` later,
        whoever leads. Before the first pipeline it is past: nobody knows whether there will ever
        be one.
        """
        return math.inf if self.is_open else self._last_open + hold_s

    async def wait_open(self, until: float | None = None) -> Pipeline:
        """Waits for a pipeline and returns it.

        Raises:
            Unavailable: it did not come in time, or this process is stopping.
        """
        if self.current is not None:
            return self.current
        try:
            async with asyncio.timeout_at(until):
                while self.current is None:
                    if self.is_stopping:
                        raise errors.Unavailable(STOPPING)
                    await self.wait_change()
        except TimeoutError:
            raise errors.Unavailable(NO_PIPELINE) from None
        return self.current

    async def wait_change(self) -> None:
        """Waits until a pipeline or a scheduler comes or goes."""
        await self._changed.wait()

    def open(self, pipeline: Pipeline) -> None:
        """Notes the pipeline that serves from now on."""
        self.current = self._last = pipeline
        self.note_change()

    def shut(self) -> None:
        """Notes that no pipeline serves."""
        if self.current is not None:
            self.current = None
            self._last_open = asyncio.get_running_loop().time()
        self.note_change()

    def note_change(self) -> None:
        """Wakes those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
