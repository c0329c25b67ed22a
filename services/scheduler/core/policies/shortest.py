"""Shortest remaining output first, by predicted lengths (Shahout et al., "Don't Stop Me Now:
Embedding Based Scheduling for LLMs" (TRAIL), ICLR'25; Qiu et al., "Efficient Interactive LLM
Serving with Proxy Model-based Sequence Length Prediction" (SSJF), 2024).

Before each iteration, running and waiting requests are compared by the number of tokens that they
are expected to generate from now on, and the ones with the fewest are in the batch. So a short
request that arrives takes the place of a long one that runs. The long one keeps its memory and
waits for its next iteration. Mean latencies become shorter. A long request may wait for ever, which
`aging.py` prevents.

Lengths are predicted from ended requests with about the same `max_tokens`, or by the predictor in
the options.
"""

from collections.abc import Iterable
from sys import maxsize
from typing import ClassVar

from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.policies import (
    LengthPredictor,
    MemoryView,
    Policy,
    PolicyOptions,
    PoolView,
    Selection,
)
from services.scheduler.core.request import Request, RequestState


class ShortestPolicy(Policy):
    """The policy `shortest`: each iteration runs the requests with the fewest tokens left."""

    name: ClassVar[str] = "shortest"
    keeps_order: ClassVar[bool] = False

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self.max_tokens = self.max_span_tokens = options.max_batch_tokens
        self._predictor: LengthPredictor = options.predictor or ExpectedOutput()
        # Requests that have been in a batch and may run, in an order that a replay repeats.
        self._selected: dict[Request, None] = {}

    def claim(self, request: Request) -> float:
        """Returns the number by which requests are compared; the requests with the lowest numbers
        are selected."""
        return self._predictor.n_left(request)

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the requests with the lowest numbers (`claim`), decodes before prompts."""
        self._learn()
        chosen = self._with_memory(pool.candidates(), kv_manager.n_free_blocks, kv_manager)
        selections: list[Selection] = []
        n_free = self.max_tokens or maxsize
        for request in sorted(chosen, key=lambda one: not one.is_decoding):
            if not n_free or (request.runs_whole and request.n_unscheduled > n_free):
                break
            reservation = request.reservation or kv_manager.reserve(request)
            if reservation is not None:
                n_tokens = min(request.n_unscheduled, n_free)
                n_free -= n_tokens
                selections.append(Selection(request, n_tokens, reservation))
        self._selected.update(dict.fromkeys(one.request for one in selections))
        return selections

    def _with_memory(
        self, candidates: Iterable[Request], n_blocks: int, kv_manager: MemoryView
    ) -> list[Request]:
        """Returns the requests of the next batch, sorted by `claim` from the lowest number. The
        first waiting request for which the `n_blocks` free blocks are too few is left out, and so
        are all waiting requests after it."""
        by_claim = sorted(candidates, key=lambda one: (self.claim(one), one.arrival))
        chosen: list[Request] = []
        for request in by_claim:
            if len(chosen) == self.max_batch_size:
                break
            if request.reservation is None:
                n_blocks -= kv_manager.n_blocks_to_admit(request)
            if request.reservation is not None or n_blocks >= 0:
                chosen.append(request)
        return chosen

    def _learn(self) -> None:
        for request in [one for one in self._selected if one.state is RequestState.FINISHED]:
            del self._selected[request]
            if request.generated_token_ids:
                n_generated = len(request.generated_token_ids)
                self._predictor.learn(n_generated, request.max_new_tokens)
