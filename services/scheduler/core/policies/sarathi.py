"""Sarathi-Serve's stall-free batches (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM
Inference with Sarathi-Serve", OSDI'24, Algorithm 3).

A batch has a budget of tokens. First it takes one token of each running decode, then the next chunk
of each prompt that has begun, and then prompts of waiting requests, until the budget is used up. So
no decode ever waits for a prompt ("stall-free"), and an iteration takes about as long as the budget
says. The policy `chunked` has the same idea, and beyond the paper begins prompts in groups and
divides the decodes among the batches in flight.
"""

from itertools import chain
from typing import ClassVar

from services.scheduler.core.policies import MemoryView, Policy, PolicyOptions, PoolView, Selection
from services.scheduler.core.request import Request


class SarathiPolicy(Policy):
    """The policy `sarathi`: all decodes, then begun prompts, then new prompts, within a budget."""

    name: ClassVar[str] = "sarathi"

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        if options.max_batch_tokens is None or options.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                f"the policy `sarathi` needs max_batch_tokens of at least {self.max_batch_size}, "
                f"not {options.max_batch_tokens}"
            )
        self._budget = self.max_tokens = self.max_span_tokens = options.max_batch_tokens

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the next batch: lines 4 to 21 of the paper's Algorithm 3."""
        candidates = pool.candidates()
        running: list[Request] = []
        waiting: list[Request] = []  # the first one, which is taken to see that no other runs
        for request in candidates:
            if request.reservation is None:
                waiting.append(request)
                break
            running.append(request)
        decodes = (one for one in running if one.is_decoding)
        begun = (one for one in running if not one.is_decoding)
        selections: list[Selection] = []
        n_free = self._budget
        for request in chain(decodes, begun, waiting, candidates):
            if not n_free or len(selections) == self.max_batch_size:
                break
            if request.runs_whole and request.n_unscheduled > n_free:
                break
            reservation = request.reservation or kv_manager.reserve(request)
            if reservation is None:
                break
            n_tokens = min(request.n_unscheduled, n_free)
            n_free -= n_tokens
            selections.append(Selection(request, n_tokens, reservation))
        return selections
