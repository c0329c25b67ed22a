"""Compiles kernels and records graphs in advance, so that the first requests do not wait for them.

A kernel is compiled at its first call, which takes seconds. Compiled kernels belong to the process,
so kernels are compiled when the weights have been loaded. Recording the decodes of one batch shape
usually takes some tens of milliseconds (see `decode_graphs`). Recordings belong to an epoch, so
they are made when an epoch begins. A time limit bounds how long the recordings delay the epoch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from services.common.sampling import SamplingParams
from services.worker.engine.decode_graphs import DecodeGraphs, Graph
from services.worker.engine.trial_iteration import SAMPLED_PENALIZED, TrialIteration, trial_lengths
from services.worker.models import StageModel
from services.worker.models.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)

_N_DECODES = 8

# Range of the numbers of tokens of iterations with prompts. All powers of two in it are run, since
# the tiles of products depend on the number of tokens.
_FEWEST_TOKENS, _MOST_TOKENS = 16, 2048

# The first two leave logits in the model's type; the others convert logits to float32.
_GREEDY = SamplingParams(temperature=0)
_LIMITED = SamplingParams(temperature=1, top_k=50, top_p=0.9, seed=0)
_GREEDY_ADJUSTED = replace(SAMPLED_PENALIZED, temperature=0)


def compile_kernels(
    model: StageModel, *, n_tokens: int, block_size: int, new_graph: Callable[[], Graph] | None
) -> None:
    """Runs every kind of iteration of up to `n_tokens` tokens, so that all kernels are compiled.

    The iterations are decodes with and without prompts. Tokens are chosen by argmax and by
    sampling, with and without adjusted logits (penalties, biases and masks). With `new_graph` a
    batch of decodes is also recorded.
    """
    started_s = time.monotonic()
    decodes = [1] * min(_N_DECODES, n_tokens)
    trial = partial(TrialIteration, model, block_size=block_size)
    trial(decodes, sampling=_GREEDY, new_graph=new_graph).run()
    trial(decodes, sampling=_LIMITED).run()
    trial(decodes, sampling=_GREEDY_ADJUSTED).run()
    n_mixed = _FEWEST_TOKENS
    while n_mixed <= min(_MOST_TOKENS, n_tokens):
        trial(trial_lengths(n_mixed, model.config.max_position_embeddings)).run()
        n_mixed *= 2
    log.info("kernels are compiled, in %.1f s", time.monotonic() - started_s)


def record_decodes(
    graphs: DecodeGraphs,
    ranks: TensorParallel,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Records decode graphs for batch shapes, the most frequent shapes first, until `limit_s`
    seconds have passed.

    All `ranks` of the stage record together, and all stop as soon as one of them has reached the
    limit.

    Raises:
        TransferError: a rank is gone.
    """
    started_s = clock()
    for shape in graphs.shapes():
        graphs.record(shape)
        if _any_of(ranks, clock() - started_s >= limit_s, graphs.device):
            break
    log.info("%d shapes of decodes are recorded", graphs.n_recorded)


def _any_of(ranks: TensorParallel, is_true: bool, device: torch.device) -> bool:
    """Returns whether `is_true` is true on at least one of `ranks`. All ranks must call this
    function, and get the same result."""
    n_true = torch.full((1,), float(is_true), device=device)
    ranks.all_reduce(n_true)
    return bool(n_true.item() > 0)
