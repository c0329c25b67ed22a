"""The interface through which the serving loop uses the engine."""

from collections.abc import Sequence
from typing import Protocol

from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import Batch


class Engine(Protocol):
    """The part of the engine master that the serving loop uses: it sends batches, and takes
    results."""

    async def run(self, batch: Batch) -> None:
        """Sends a batch into the pipeline."""

    def take_results(self) -> Sequence[worker_pb2.IterationResult]:
        """Returns the results of iterations that have come since the last call. Raises
        `PipelineLost` if the pipeline is lost."""
