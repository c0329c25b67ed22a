"""Which stage a worker is: the stage of its settings, or the one that a leader assigns.

A worker is one stage for the life of its process. If a leader needs it as another one, the process
ends, and is started again without a stage by what started it. So it does where it knows an epoch
that no leader can go beyond.
"""

import asyncio

from services.common.errors import InvalidRequest
from services.worker.settings import PipelinePlace

MAX_STAGES = 1024
"""Stages of a pipeline at most: no model has more layers."""


class Assignment:
    """The stage of this worker, which may not be known yet."""

    def __init__(self, fixed: PipelinePlace | None = None) -> None:
        """`fixed` is the stage of the settings, which no leader changes."""
        self.place = fixed
        """The stage that this worker is; None until there is one."""
        self.is_fixed = fixed is not None
        """Whether the settings say which stage it is."""
        self.is_recalled = asyncio.Event()
        """Set when the process has to end, so that it starts again and knows nothing."""
        self.recalled_for = ""
        """Why it was recalled, for people."""
        self._has_place = asyncio.Event()
        if fixed is not None:
            self._has_place.set()

    def check(self, place: PipelinePlace) -> None:
        """Raises InvalidRequest if this can never be that stage."""
        if place.stage_index >= place.n_stages:
            raise InvalidRequest("stage_index", f"there is no {place}")
        if place.n_stages > MAX_STAGES:
            raise InvalidRequest("n_stages", f"must not exceed {MAX_STAGES}")
        if self.is_fixed and place != self.place:
            raise InvalidRequest("stage_index", f"this worker is {self.place} by its settings")

    def take(self, place: PipelinePlace) -> None:
        """Makes this worker that stage, or has its process end if it is another one."""
        if self.place is None:
            self.place = place
            self._has_place.set()
        elif place != self.place:
            self.recall(f"another stage is needed than {self.place}")

    def recall(self, why: str) -> None:
        """Has the process end, for a reason."""
        self.recalled_for = why
        self.is_recalled.set()

    async def wait(self) -> PipelinePlace:
        """Waits until there is a stage, and returns it."""
        await self._has_place.wait()
        assert self.place is not None
        return self.place
