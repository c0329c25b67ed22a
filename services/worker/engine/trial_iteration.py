"""An iteration of artificial requests, which is run before the first epoch.

A trial iteration measures the memory of an iteration, or compiles its kernels. The results are
meaningless: all requests share one block of keys and values and one state of each layer, and the
other ranks are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from services.common.sampling import SamplingParams
from services.worker.engine.decode_graphs import Graph
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan
from services.worker.models import StageModel

# Number of requests of a trial iteration whose tokens are sampled with filters and penalties.
_N_SAMPLED = 256

SAMPLED_PENALIZED = SamplingParams(
    temperature=1,
    top_k=50,
    top_p=0.9,
    frequency_penalty=1,
    logit_bias=((0, 1.0),),
    bad_token_ids=(0,),
    seed=0,
)
"""Sampling options whose iteration takes the most memory: top-k, top-p, a penalty, a bias and a
mask."""


class TrialIteration:
    """One rank's part of an iteration that runs one prompt for each of `lengths`, in tokens, and
    samples one token after each prompt.

    Prompts of one token run as decodes. If all prompts have one token and `new_graph` is given, the
    iteration is recorded as a graph.
    """

    def __init__(
        self,
        model: StageModel,
        lengths: Sequence[int],
        *,
        block_size: int,
        sampling: SamplingParams = SAMPLED_PENALIZED,
        new_graph: Callable[[], Graph] | None = None,
    ) -> None:
        self._model = model
        self._lengths = lengths
        self._block_size = block_size
        self._sampling = sampling
        self._new_graph = new_graph

    def run(self) -> None:
        """Runs one iteration, and then frees its results and its memory."""
        model, lengths = self._model, self._lengths
        runner = ModelRunner(
            model,
            n_kv_blocks=1,
            block_size=self._block_size,
            tensor_parallel=LoneRank(model.tp_rank, model.tp_size),
            new_graph=self._new_graph,
            max_graph_batch_size=len(lengths),
            max_batch_tokens=sum(lengths),
            n_state_rows=0,
        )
        n_groups = len(model.kv_groups.windows)
        batch = runner.prepare(
            trial_plan(
                lengths,
                self._block_size,
                self._sampling,
                n_groups=n_groups,
                samples=model.has_head or not model.is_last,
            )
        )
        hidden = None if model.is_first else runner.empty_hidden(lengths).zero_()
        if model.is_last:
            runner.sample(batch, runner.logits(batch, hidden))
        else:
            runner.forward(batch, hidden)
        runner.close()


class LoneRank:
    """Replacement for the collectives of a rank if the other ranks of the stage are absent. Results
    have the right shapes and wrong values."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> None:
        """Leaves `tensor` unchanged."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the size of a real result, made of copies of this rank's tensor, one
        for each rank."""
        return torch.cat([tensor] * self.size, dim=-1)


def trial_lengths(n_tokens: int, max_model_len: int) -> list[int]:
    """Returns lengths of spans whose sum is `n_tokens`: many spans of one token, and a few long
    spans of up to `max_model_len` tokens."""
    n_single = min(_N_SAMPLED, n_tokens // 2)
    n_long = n_tokens - n_single
    lengths = [max_model_len] * (n_long // max_model_len)
    if n_long % max_model_len:
        lengths.append(n_long % max_model_len)
    return lengths + [1] * n_single


def trial_plan(
    lengths: Sequence[int],
    block_size: int,
    sampling: SamplingParams,
    *,
    n_groups: int = 1,
    samples: bool = True,
) -> IterationPlan:
    """Returns a plan with one prompt for each of `lengths`. All prompts are stored in block 0 of
    every K/V group. `samples` says whether a token is sampled after each prompt."""
    n_blocks = [-(-length // block_size) for length in lengths]
    return IterationPlan(
        iteration=0,
        released_rows=(),
        admissions=[Admission(row, length, sampling) for row, length in enumerate(lengths)],
        rows=range(len(lengths)),
        start_positions=[0] * len(lengths),
        n_tokens=lengths,
        sample=[samples] * len(lengths),
        n_new_blocks=n_blocks,
        token_on_rank=[False] * len(lengths),
        token_ids=[0] * sum(lengths),
        new_block_ids=[0] * (sum(n_blocks) * n_groups),
    )
