"""Algorithm 1 with a budget of tokens per iteration: a long prompt is run in chunks.

Requests are admitted in order, as in `orca`, but a batch has at most `max_batch_tokens` tokens.
Each decoding request has one, also behind a prompt that is cut off (a request can begin there while
the order limits the prompt's client). The remaining tokens go to prompts in the order of the pool;
the last prompt is cut off and continues in the next iteration. So all iterations take about equally
long, and no decoding request waits for a prompt (Agrawal et al., "Sarathi-Serve", OSDI'24). No
request is admitted while an earlier prompt is unfinished.

Prompts that arrive together begin in groups (`prompt_groups.py`), so that on average their first
tokens come sooner. A pipeline of several stages is only as fast as its largest batch, so `n_shares`
batches in flight share the running requests evenly. The order may limit the tokens of clients with
many requests (`fair_batch.py`); their prompts then do not block the prompts of other clients.
Prompts of requests for vectors have a limited share of the tokens (`vector_share.py`).
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

from services.scheduler.core.admission.prompt_groups import PromptGroups
from services.scheduler.core.order.order import BatchLimits
from services.scheduler.core.policies import (
    MemoryView,
    Policy,
    PolicyOptions,
    PoolView,
    Selection,
    selection_of,
)
from services.scheduler.core.policies.vector_share import vector_share_of
from services.scheduler.core.request import Request


class ChunkedPolicy(Policy):
    """The policy `chunked`: iteration-level first come, first served, in batches of even size."""

    name: ClassVar[str] = "chunked"
    takes_drafts: ClassVar[bool] = True
    limits_vectors: ClassVar[bool] = True

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        n_shares: int = 1,
        vector_share: float | None = None,
    ) -> None:
        """Raises ValueError if `max_batch_tokens` is below `max_batch_size`, or if `vector_share`
        is not in its range."""
        super().__init__(
            PolicyOptions(max_batch_size, max_batch_tokens, n_shares, vector_share=vector_share)
        )
        if max_batch_tokens < max_batch_size:
            # Decodes alone could fill the budget, and prompts would starve.
            raise ValueError(f"max_batch_tokens: {max_batch_tokens} is less than {max_batch_size}")
        self.max_tokens = self.max_span_tokens = self._max_tokens = max_batch_tokens
        self._n_shares = n_shares
        self.prompt_groups: PromptGroups = PromptGroups(
            max_batch_size=max_batch_size, max_batch_tokens=max_batch_tokens, n_shares=n_shares
        )
        self._vectors = vector_share_of(vector_share, self.prompt_groups)

    @classmethod
    def of(cls, options: PolicyOptions) -> Self:
        return cls(
            max_batch_size=options.max_batch_size,
            max_batch_tokens=options.max_batch_tokens or 0,
            n_shares=options.n_shares,
            vector_share=options.vector_share,
        )

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the next batch: requests in the order of the pool, each with as many tokens as
        are free. At most one group of new prompts begins (`prompt_groups.py`). Prompts of encoders
        are not grouped: each must fit into the batch as a whole, and as many as fit begin, because
        a client needs the results of all its texts."""
        selections: list[Selection] = []
        n_free, n_places = self._max_tokens, self.max_batch_size
        n_decodes_free = -(-pool.n_running // self._n_shares)
        n_prompts = n_prompt_tokens = 0
        vector_tokens, n_waiting = self._vectors.limit(pool)
        limits, candidates = pool.batch_limits(vector_tokens), pool.candidates()
        max_running = self.max_batch_size * self._n_shares
        riders = limits.riders(candidates, max_running) if limits else candidates
        for request in riders:
            # This runs for each token of all decodes; calling properties would take half the time.
            is_decode = request.n_scheduled >= request.n_prefill_tokens
            if is_decode:
                if not n_decodes_free:
                    continue  # its turn comes with the next batch
                n_decodes_free -= 1
            elif request.reservation is None and (
                request.n_tokens > n_free
                if request.runs_whole
                else self.prompt_groups.is_whole(
                    n_prompts, n_prompt_tokens, n_waiting=min(n_waiting, n_places)
                )
            ):
                break
            reservation = request.reservation or kv_manager.reserve(request)
            if reservation is None:
                break
            n_tokens = request.n_tokens + request.n_awaited - request.n_scheduled
            if n_tokens > n_free:
                n_tokens = n_free
            if limits is not None:
                n_tokens = limits.take(request, n_tokens)
            n_free -= n_tokens
            n_places -= 1
            if not is_decode and (vector_tokens is None or not request.wants_vector):
                n_prompts += 1
                n_prompt_tokens += n_tokens
                n_waiting -= request.reservation is None
            selections.append(selection_of((request, n_tokens, reservation)))
            if not n_places or not n_free:
                n_decodes = min(n_places, n_decodes_free, n_tokens - 1)
                return _with_decodes_behind(selections, riders, n_decodes, limits)
        return selections

    def is_full(self, ready: Sequence[Request]) -> bool:
        """Returns whether the running requests `ready`, or their tokens, leave no room in the next
        batch."""
        return (
            len(ready) >= self.max_batch_size or self._vectors.n_tokens(ready) >= self._max_tokens
        )


def _with_decodes_behind(
    selections: list[Selection],
    riders: Iterator[Request],
    n_decodes: int,
    limits: BatchLimits | None,
) -> list[Selection]:
    """Returns the full batch `selections` with at most `n_decodes` further requests: decoding
    requests with later places. Each of them gets one of the tokens of the last request in
    `selections`, a prompt. If that request is a decode, `n_decodes` is 0. `riders` yields the
    candidates with later places."""
    prompt, n_tokens, reservation = selections[-1]
    index = len(selections) - 1
    while n_decodes and (request := next(riders, None)) and request.reservation is not None:
        if request.n_scheduled >= request.n_prefill_tokens:
            n_decodes -= 1
            n_tokens -= 1
            if limits is not None:
                limits.take(request, 1)
            selections.append(selection_of((request, 1, request.reservation)))
    selections[index] = selection_of((prompt, n_tokens, reservation))
    return selections
