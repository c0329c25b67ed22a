"""FasterTransformer's schedule, as the Orca paper measured it (Yu et al., OSDI'22, sections 3 and
6.2).

A batch runs until its last request is complete, in microbatches that follow each other through the
stages. The prompts of a batch may differ in length, and the engine has no batch of different
shapes. So the first iteration computes, of each prompt, as many tokens as the shortest prompt has,
and the other tokens of longer prompts follow one by one, as decodes do.

Two losses of the real engine are not modelled: here a complete request is no longer computed, and a
request allocates no more memory than its longest sequence. `benchmarks.paper.faster_transformer`
models them.
"""

from collections.abc import Sequence
from typing import ClassVar

from services.scheduler.core.policies import PolicyOptions
from services.scheduler.core.policies.request_level import RequestLevelPolicy
from services.scheduler.core.request import Request


class FasterTransformerPolicy(RequestLevelPolicy):
    """The policy `faster_transformer`: one batch at a time, divided into `n_shares`
    microbatches."""

    name: ClassVar[str] = "faster_transformer"

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options, microbatch_size=-(-options.max_batch_size // options.n_shares))
        self._n_groups = 1

    def n_tokens(self, request: Request, group: Sequence[Request]) -> int:
        """Returns the number of tokens of a request in its next iteration: the length of the
        batch's shortest prompt in the first iteration, and then 1. A prompt that runs whole is not
        cut."""
        if request.runs_whole:
            return request.n_unscheduled
        if request.n_scheduled:
            return 1
        return min(request.n_unscheduled, *(one.n_prompt_tokens for one in group))
