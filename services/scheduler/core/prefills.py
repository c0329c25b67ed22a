"""The admitted requests of a pipeline whose prompts have tokens that were in no batch yet."""

from collections.abc import Sequence

from services.scheduler.core.request import Request


class Prefills:
    """Records the admitted requests that have prompt tokens in no batch yet, and counts these
    tokens."""

    def __init__(self) -> None:
        self._requests: dict[Request, None] = {}

    @property
    def n_tokens(self) -> int:
        """Number of prompt tokens that were in no batch yet."""
        return sum([one.n_prefill_tokens - one.n_scheduled for one in self._requests])

    def settle(self, batch: Sequence[Request]) -> None:
        """Brings the record up to date after `batch` has been selected. Adds its requests that have
        prompt tokens left, and removes all requests that have none left. A token is left until it
        is in a batch."""
        known = [*self._requests, *batch]
        self._requests = {one: None for one in known if one.n_scheduled < one.n_prefill_tokens}

    def discard(self, request: Request) -> None:
        """Removes a request that has left the pipeline, if it is there."""
        self._requests.pop(request, None)
