"""A frontend's knowledge of the pipeline that serves at the moment, or else of the last pipeline
that served. Tasks can wait for the next pipeline.

Times are readings of the event loop's clock.
"""

import asyncio
import math

from services.common import errors
from services.frontend.request.pipeline import ServedPipeline

STOPPING = "the server is stopping"
NO_PIPELINE = "no pipeline at the moment; try again"


class KnownPipeline:
    """Keeps the pipeline that serves or, if there is none, the last pipeline that served. Wakes
    tasks that wait for a change."""

    def __init__(self) -> None:
        self.current: ServedPipeline | None = None
        """Pipeline that serves at the moment; None if there is none."""
        self.shortfall = ""
        """Reason why the scheduler has no pipeline, as far as it has told. The reason names
        workers, but no addresses."""
        self.is_stopping = False
        """Whether this process is stopping and takes no more requests."""
        self._last: ServedPipeline | None = None
        self._last_open = -math.inf
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a pipeline serves at the moment. If so, requests are sent to the scheduler at
        once."""
        return self.current is not None

    @property
    def last(self) -> ServedPipeline:
        """Current pipeline, or the last one if there is none now.

        Raises:
            Unavailable: there has been no pipeline, or this process is stopping.
        """
        if self.is_stopping:
            raise errors.Unavailable(STOPPING)
        if self._last is None:
            raise errors.Unavailable(NO_PIPELINE)
        return self._last

    @property
    def last_model(self) -> str:
        """Name of the model that is served, or was served last. The value is empty before the first
        pipeline."""
        return "" if self._last is None else self._last.model

    def was(self, pipeline: ServedPipeline) -> bool:
        """Returns whether `pipeline` equals the current pipeline, or the last one if there is none
        now."""
        return pipeline == self._last

    def hold_deadline(self, hold_s: float) -> float:
        """Returns the time until which clients should send requests to this frontend. The time
        changes when a pipeline comes or is lost.

        The time is infinite while there is a pipeline. After the loss of a pipeline, requests may
        be held for `hold_s` seconds, whichever scheduler leads. Before the first pipeline the time
        is in the past, since there may never be a pipeline.
        """
        return math.inf if self.is_open else self._last_open + hold_s

    async def wait_open(self, until: float | None = None) -> ServedPipeline:
        """Waits for a pipeline and returns it.

        Raises:
            Unavailable: no pipeline came by the time `until`, or this process is stopping.
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
        """Waits until a pipeline or a scheduler comes or is lost."""
        await self._changed.wait()

    def open(self, pipeline: ServedPipeline) -> None:
        """Notes that `pipeline` serves from now on."""
        self.current = self._last = pipeline
        self.shortfall = ""
        self.note_change()

    def shut(self) -> None:
        """Notes that no pipeline serves from now on."""
        if self.current is not None:
            self.current = None
            self._last_open = asyncio.get_running_loop().time()
        self.note_change()

    def note_change(self) -> None:
        """Wakes the tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
