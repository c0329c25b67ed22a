"""The pipeline that serves at the moment or, if there is none, the last pipeline that served, as
the scheduler has reported it. Tasks can wait for the next pipeline.

Times are readings of the event loop's clock.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from orcinus.v1 import scheduler_pb2
from orcinus.v1.scheduler_pb2 import SleepState

from services.common import errors
from services.frontend.request.pipeline import ServedPipeline, Traits

STOPPING = "the server is stopping"
NO_PIPELINE = "no pipeline at the moment; try again"

ModelState = Literal["serving", "asleep", "starting", "unavailable"]
"""State of a model. `serving`: a pipeline serves it. `asleep`: there are no workers, and the first
request starts some. `starting`: workers are being started because of a request, or no pipeline has
served yet. `unavailable`: the pipeline was lost."""

_SLEEPING: dict[SleepState, ModelState] = {
    SleepState.SLEEP_STATE_ASLEEP: "asleep",
    SleepState.SLEEP_STATE_STARTING: "starting",
}


class KnownPipeline:
    """Keeps the pipeline that serves or, if there is none, the last pipeline that served. Wakes
    tasks that wait for a change."""

    def __init__(self) -> None:
        self.current: ServedPipeline | None = None
        """Pipeline that serves at the moment; None if there is none."""
        self.shortfall = ""
        """Reason why the scheduler has no pipeline; empty if the scheduler has reported none. The
        reason names workers, but no addresses."""
        self.is_stopping = False
        """Whether this process is stopping and takes no more requests."""
        self.n_waiting = 0
        """Number of tasks that wait for a pipeline."""
        self.on_waiting: Callable[[], None] = lambda: None
        """Called when `n_waiting` changes."""
        self._loaded: Traits = ()  # names and digests of the adapters that clients have loaded
        self._sleeping: ModelState | None = None  # while the scheduler says that the model sleeps
        self._last: ServedPipeline | None = None
        self._last_open = -math.inf
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether a pipeline serves at the moment. If so, requests are sent to the scheduler at
        once."""
        return self.current is not None

    @property
    def state(self) -> ModelState:
        """State of the model: whether a pipeline serves it and, if not, why."""
        if self.is_open:
            return "serving"
        return self._sleeping or ("starting" if self._last is None else "unavailable")

    @property
    def is_sleeping(self) -> bool:
        """Whether no pipeline serves because none was needed: the model is asleep, or is being
        started."""
        return not self.is_open and self._sleeping is not None

    @property
    def trouble(self) -> str:
        """Reason why a new request would have to wait; empty if a pipeline serves."""
        if self.is_open:
            return ""
        return "no pipeline" if self._sleeping is None else f"the model is {self._sleeping}"

    @property
    def last(self) -> ServedPipeline:
        """The pipeline that serves now or, if there is none, the last one that served.

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
        """Returns whether `pipeline` equals the pipeline that serves now or, if there is none, the
        last one that served."""
        return replace(pipeline, loaded=self._loaded) == self._last

    def set_loaded(self, digests: Mapping[str, str]) -> None:
        """Notes which adapters clients have loaded. `digests` has the digest of each adapter, keyed
        by the adapter's name."""
        self._loaded = tuple(sorted(digests.items()))
        if self._last is not None:
            self._last = replace(self._last, loaded=self._loaded)
        if self.current is not None:
            self.current = self._last

    def hold_deadline(self, hold_s: float) -> float:
        """Returns the time until which this frontend accepts new requests, even if there is no
        pipeline. The time changes when a pipeline comes or is lost:

        - While a pipeline serves, the time is infinite.
        - While the model is asleep or being started, the time is infinite if the frontend knows the
          pipeline that served last.
        - Otherwise, the time is `hold_s` seconds after the last loss. A loss is the loss of the
          pipeline or, for a model that was asleep or being started, of the scheduler. Before the
          first loss, the time is in the past, because there may never be a pipeline.
        """
        is_taking = self.is_open or (self.is_sleeping and self._last is not None)
        return math.inf if is_taking else self._last_open + hold_s

    async def wait_open(self, until: float | None = None) -> ServedPipeline:
        """Waits for a pipeline and returns it. A task that waits here wakes a model that is asleep.

        Raises:
            Unavailable: no pipeline came by the time `until` (None sets no limit), or this process
            is stopping.
        """
        if self.current is not None:
            return self.current
        self._count_waiting(1)
        try:
            async with asyncio.timeout_at(until):
                while self.current is None:
                    if self.is_stopping:
                        raise errors.Unavailable(STOPPING)
                    await self.wait_change()
        except TimeoutError:
            raise errors.Unavailable(NO_PIPELINE) from None
        finally:
            self._count_waiting(-1)
        return self.current

    def _count_waiting(self, n: int) -> None:
        self.n_waiting += n
        self.on_waiting()

    async def wait_change(self) -> None:
        """Waits until a pipeline or a scheduler comes or is lost, or the model falls asleep or
        begins to start."""
        await self._changed.wait()

    def open(self, pipeline: ServedPipeline) -> None:
        """Notes that `pipeline` serves from now on, with the adapters that clients have loaded."""
        self.current = self._last = replace(pipeline, loaded=self._loaded)
        self._sleeping = None
        self.shortfall = ""
        self.note_change()

    def shut(self) -> None:
        """Notes that no pipeline serves from now on. The reason is unknown until the scheduler
        reports it. Until then it is also unknown whether the model is asleep."""
        if self.current is not None or self._sleeping is not None:
            self.current = self._sleeping = None
            self._last_open = asyncio.get_running_loop().time()
        self.note_change()

    def sleep(self, message: scheduler_pb2.Sleep) -> None:
        """Records that the model is asleep or being started. `message` may also describe the
        pipeline that served last."""
        self._sleeping = _SLEEPING.get(message.state)
        if message.HasField("pipeline"):
            last = ServedPipeline.from_proto(message.pipeline)
            self._last = replace(last, loaded=self._loaded)
        self.note_change()

    def note_change(self) -> None:
        """Wakes the tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
