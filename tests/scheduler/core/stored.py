"""The expected contents of K/V memory, as ranks that run all batches in order would have stored
them. For each slot, this is the token, all tokens before it, and the scope of the request."""

from collections.abc import Callable

from services.scheduler.core.batch import Batch
from services.scheduler.core.request import Request

Content = tuple[bytes | None, tuple[int, ...]]


class StoredTokens:
    """K/V memory that checks, before a span runs, that all tokens before it are there."""

    def __init__(self, token_at: Callable[[Request, int], int], *, block_size: int) -> None:
        """`token_at` returns the token that a request generates for a position of its sequence."""
        self._token_at = token_at
        self._block_size = block_size
        self._slots: dict[int, Content] = {}
        self._block_ids: dict[Request, list[int]] = {}
        self.n_computed = 0
        """Number of tokens of all spans so far."""

    def run(self, batch: Batch) -> None:
        """Runs a batch: checks that the tokens before each span are stored, and then stores the
        tokens of all spans."""
        before = dict(self._slots)
        for span in batch.spans:
            if span.is_admission:
                self._block_ids[span.request] = []
            blocks = self._block_ids[span.request]
            blocks += span.new_block_ids
            end = span.start_position + span.n_tokens
            contents = self._contents(span.request, end)
            slots = [
                blocks[at // self._block_size] * self._block_size + at % self._block_size
                for at in range(end)
            ]
            start = span.start_position
            assert [before[slot] for slot in slots[:start]] == contents[:start]
            self._slots.update(zip(slots[start:], contents[start:], strict=True))
            self.n_computed += span.n_tokens

    def _contents(self, request: Request, end: int) -> list[Content]:
        prompt = list(request.prompt_token_ids[:end])
        tokens = prompt + [self._token_at(request, at) for at in range(len(prompt), end)]
        return [(request.cache_scope, tuple(tokens[: at + 1])) for at in range(end)]
