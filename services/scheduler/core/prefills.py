"""The admitted requests of a pipeline whose prompts have tokens that were in no batch yet."""

from collections.abc import Sequence

from services.scheduler.core.request import Request


class Prefills:
    """The admitted requests with prompt tokens that were in no batch yet, and the number of these
    tokens."""

    def __init__(self) -> None:
        self._requests: dict[Request, None] = {}

    @property
    def n_tokens(self) -> int:
        """Number of prompt tokens that were in no batch yet."""
        return sum([one.n_prefill_tokens - one.n_scheduled for one in self._requests])

    def settle(self, batch: Sequence[Request]) -> None:
        """Notes that a batch has been selected. Adds the requests of the batch that have prompt
        tokens left, and removes requests that have none left."""
        known = [*self._requests, *batch]
        self._requests = {one: None for one in known if one.n_scheduled < one.n_prefill_tokens}

    def discard(self, request: Request) -> None:
        """Removes a request that has left the pipeline, if it is there."""
        self._requests.pop(request, None)
