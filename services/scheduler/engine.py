"""The engine as the serving loop sees it."""

from collections.abc import Sequence
from typing import Protocol

from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import Batch


class Engine(Protocol):
    """The part of an engine master that the loop needs."""

    async def run(self, batch: Batch) -> None:
        """Sends a batch into the pipeline."""

    def take_results(self) -> Sequence[worker_pb2.IterationResult]:
        """Returns the results that have come since the last call. Raises `PipelineLost` if the
        pipeline is lost."""
