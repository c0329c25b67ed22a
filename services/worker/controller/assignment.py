"""The stage of a worker, which the worker's settings name or a leader assigns.

A worker is one stage for the life of its process. If a leader assigns another stage, the process
ends, and its launcher or Kubernetes starts it again without a stage. The process also ends if it
has seen an epoch number that no leader can have reached (`services.common.epochs`).
"""

import asyncio

from services.common.errors import InvalidRequest
from services.worker.settings import PipelinePlace

MAX_STAGES = 1024
"""Largest number of stages of a pipeline. The limit is safe, because no model has more layers."""


class Assignment:
    """The stage of this worker. The stage may be unknown until a leader assigns one."""

    def __init__(self, fixed: PipelinePlace | None = None) -> None:
        """`fixed` is the stage that the settings name, which no leader can change. None if the
        settings name no stage."""
        self.place = fixed
        """The stage that this worker is; None until a stage is assigned."""
        self.is_fixed = fixed is not None
        """Whether the stage comes from the settings."""
        self.is_recalled = asyncio.Event()
        """An event that is set when the process must end. The process is then started again,
        without a stage and an epoch."""
        self.recalled_for = ""
        """Reason why the process must end, as text for the log."""
        self._has_place = asyncio.Event()
        if fixed is not None:
            self._has_place.set()

    def check(self, place: PipelinePlace) -> None:
        """Raises InvalidRequest if this worker can never serve the stage `place`."""
        if place.stage_index >= place.n_stages:
            raise InvalidRequest("stage_index", f"there is no {place}")
        if place.n_stages > MAX_STAGES:
            raise InvalidRequest("n_stages", f"must not exceed {MAX_STAGES}")
        if self.is_fixed and place != self.place:
            raise InvalidRequest("stage_index", f"this worker is {self.place} by its settings")

    def take(self, place: PipelinePlace) -> None:
        """Assigns the stage `place` to this worker. If the worker already is another stage, the
        worker is recalled: its process ends and starts again."""
        if self.place is None:
            self.place = place
            self._has_place.set()
        elif place != self.place:
            self.recall(f"another stage is needed than {self.place}")

    def recall(self, why: str) -> None:
        """Ends the process, for the reason `why`, so that it is started again without a stage."""
        self.recalled_for = why
        self.is_recalled.set()

    async def wait(self) -> PipelinePlace:
        """Waits until this worker has a stage, and returns the stage."""
        await self._has_place.wait()
        assert self.place is not None
        return self.place
