"""Changes the logits of tokens that have already occurred, so that they are less or more likely to
occur again.

    repetition        divides a positive logit, and multiplies a negative one, if the prompt or the
                      generated tokens contain the token (Keskar et al., "CTRL: a conditional
                      transformer language model for controllable generation", 2019, section 4.1)
    frequency         is subtracted once for each time that the token was generated
    presence          is subtracted once if the token was generated

The penalties apply in this order, in float32: a bfloat16 logit of 20 would not change if 0.05 were
subtracted. Tokens of the prompt count only for the repetition penalty.

This version is for a CPU. On a GPU the host would wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.forms.sampling_columns import IN_PROMPT, Penalties


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """Returns a float32 copy of `logits` [n_rows, vocab_size] in which the rows of `penalties` are
    penalised.

    NaNs and infinities stay unchanged.
    """
    penalized = logits.to(torch.float32, copy=True)
    # Only the logits of tokens that have occurred change, and these are few.
    counts = penalties.counts[penalties.count_rows]  # [n_penalized, vocab_size]
    of, ids = counts.nonzero(as_tuple=True)
    rows, n_generated = penalties.rows[of], counts[of, ids] & ~IN_PROMPT
    values, repetition = penalized[rows, ids], penalties.repetition[of]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= penalties.frequency[of] * n_generated
    values -= penalties.presence[of] * (n_generated > 0)
    penalized[rows, ids] = values
    return penalized
