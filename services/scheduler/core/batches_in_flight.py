"""The batches of one pipeline that have been sent and have not returned.

A pipeline returns its batches in the order in which they were sent.
"""

from collections.abc import Collection, Mapping

from services.scheduler.core.batch import Batch
from services.scheduler.core.request import Request


class BatchesInFlight:
    """Holds the batches in flight, the oldest first."""

    def __init__(self) -> None:
        self._batches: dict[int, Batch] = {}  # by iteration

    def __len__(self) -> int:
        return len(self._batches)

    def all(self) -> Collection[Batch]:
        """Returns the batches, the oldest first."""
        return self._batches.values()

    def get(self, iteration: int) -> Batch | None:
        """Returns the batch of an iteration, or None if that batch is not in flight."""
        return self._batches.get(iteration)

    def add(self, batch: Batch) -> None:
        """Adds a batch that is about to be sent."""
        self._batches[batch.iteration] = batch

    def take(self, iteration: int, n_tokens: int) -> Batch:
        """Removes the batch that has returned with `n_tokens` tokens, and returns it.

        Raises:
            ValueError: the iteration is not the oldest in flight, or the number of tokens is wrong.
        """
        oldest = next(iter(self._batches), None)
        if iteration != oldest:
            raise ValueError(
                f"iteration {iteration} returned, but {oldest} is the oldest in flight"
            )
        batch = self._batches.pop(iteration)
        n_expected = batch.n_sampled + batch.n_drafts
        if n_tokens != n_expected:
            raise ValueError(
                f"iteration {iteration} returned {n_tokens} tokens instead of {n_expected}"
            )
        return batch

    def replace(self, replacements: Mapping[Request, Request]) -> None:
        """Replaces each request that is a key of `replacements` by its value, in all batches."""
        for iteration, batch in self._batches.items():
            self._batches[iteration] = batch.with_requests(replacements)

    def clear(self) -> None:
        """Forgets all batches, because the pipeline is lost."""
        self._batches.clear()
