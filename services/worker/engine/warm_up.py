"""Work that would hold up the first requests, done before they come.

A kernel is compiled when it is first called, which takes seconds; a shape of decodes is recorded in
some tens of milliseconds (see `decode_graphs`). Compiled kernels belong to the process, and are
compiled when the weights are loaded. Recordings belong to an epoch, and are made when it begins,
within a time limit, so that a pipeline that forms anew is not held up either.
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

# Tokens of iterations with prompts: powers of two, for products have other tiles for more tokens.
_FEWEST_TOKENS, _MOST_TOKENS = 16, 2048

# The first two leave logits as they are, of the model's type; the others turn them into float32.
_GREEDY = SamplingParams(temperature=0)
_LIMITED = SamplingParams(temperature=1, top_k=50, top_p=0.9, seed=0)
_GREEDY_ADJUSTED = replace(SAMPLED_PENALIZED, temperature=0)


def compile_kernels(
    model: StageModel, *, n_tokens: int, block_size: int, new_graph: Callable[[], Graph] | None
) -> None:
    """Runs every kind of iteration of up to `n_tokens` tokens, so that its kernels are compiled.

    These are decodes, alone and beside prompts, with tokens chosen by argmax and sampled, each with
    and without what adjusts logits: penalties, biases and masks. With `new_graph` a batch of
    decodes is recorded as well.
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
    """Records the commonest shapes of decodes, one after the other until `limit_s` has passed.

    `ranks` share the stage and record together: all stop when one of them would.

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
    """Returns whether it is true on at least one of the ranks; all ranks get the same answer."""
    n_true = torch.full((1,), float(is_true), device=device)
    ranks.all_reduce(n_true)
    return bool(n_true.item() > 0)
