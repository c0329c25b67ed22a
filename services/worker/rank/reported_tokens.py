"""The tokens that a rank reports for an iteration, without the tokens after a rejected draft."""

from collections.abc import Sequence

import torch
from orcinus.v1 import worker_pb2

from services.worker.engine.sampler import refuse_non_finite, without_rejected


def reported(
    sampled: torch.Tensor | list[int], message: worker_pb2.RunIterationsRequest
) -> list[int]:
    """Returns the tokens of an iteration to report. `sampled` also has tokens after rejected
    drafts, which are left out.

    Raises:
        NonFiniteLogits: some of the reported tokens have logits that are not finite.
    """
    token_ids = sampled if isinstance(sampled, list) else sampled.tolist()
    if not message.n_drafts or min(token_ids, default=0) >= 0:
        refuse_non_finite(token_ids)
        return token_ids
    token_ids, of_spans = without_rejected(token_ids, _sampled_drafts(message))
    refuse_non_finite(of_spans)
    return token_ids


def _sampled_drafts(message: worker_pb2.RunIterationsRequest) -> list[Sequence[int]]:
    """Returns the drafted tokens of each sampled span of a plan."""
    drafts: list[Sequence[int]] = []
    end = 0
    columns = zip(
        message.n_tokens, message.n_drafts, message.token_on_rank, message.sample, strict=True
    )
    for n_tokens, n_drafts, is_left_out, is_sampled in columns:
        end += 0 if is_left_out else n_tokens
        if is_sampled:
            drafts.append(message.token_ids[end - n_drafts : end])
    return drafts
