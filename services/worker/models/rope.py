"""The angles of rotary embedding, in every form in which contexts were stretched.

The forms are Hugging Face's `rope_type`s:

- "linear" divides all frequencies by the factor (Chen et al., 2023).
- "dynamic" raises the base with the length of the sequence, once it is beyond
  `max_position_embeddings`. Longer sequences are not served, and up to there it changes nothing.
- "proportional" (Gemma 4) turns only the first `partial_rotary_factor` of the waves.
- "llama3" (the Llama 3.1 release) divides only the waves that do not fit `low_freq_factor` times
  into the original context, leaves those that fit `high_freq_factor` times, and goes over smoothly
  in between.
- "yarn" (Peng et al., 2023) does the same between `beta_slow` and `beta_fast` turns, smoothly over
  the waves' numbers, and scales what turns.
- "longrope" (Ding et al., 2024) divides each wave by a factor of its own, and has two sets of them:
  for sequences within the original context and for longer ones.

Keys are kept turned, and requests with the same beginning share them. So a position has one angle
whatever becomes of its sequence: "longrope" takes the long factors for all sequences of a model
whose `max_position_embeddings` is beyond the original context, and the short ones otherwise.
A short sequence of such a model is computed as the beginning of a long one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.program import Angles
from services.worker.models.rotary_config import RopeConfig, RotaryConfig

FIRST_POSITIONS = 4096
"""The positions that the tables have before any sequence is longer."""


class RotaryEmbedding:
    """The angles of positions, in the form that `Ops.rotary` takes.

    Elements of a head that do not turn have the angle 0; `head_order` says where they are.

    On a CPU tables keep them, as far as sequences have come: they double when one goes beyond. On
    other devices the angles of each batch are computed, the same for all layers: there the host
    does not know positions without waiting for them, and recorded graphs would go on reading tables
    that are no more.
    """

    angles: Angles | None
    """The tables; None where there are none."""

    def __init__(self, config: RotaryConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._n_positions = config.max_position_embeddings
        self._dtype = dtype
        n_pairs, n_still = config.head_dim // 2, (config.head_dim - config.rotary_dim) // 2
        turning = inverse_frequencies(config.rope, config.rotary_dim, self._n_positions)
        frequencies = torch.cat((turning, turning.new_zeros(n_still)))
        scales = torch.ones(n_pairs)
        scales[: n_pairs - n_still] = attention_scale(config.rope)
        self._frequencies = torch.cat((frequencies, frequencies)).to(device)  # [head_dim], as next
        self._cos_scales = torch.cat((scales, scales)).to(device)
        self._sin_scales = torch.cat((-scales, scales)).to(device)
        self.angles = None
        if device.type == "cpu":
            first = torch.arange(min(FIRST_POSITIONS, self._n_positions))
            self.angles = Angles(*self._computed(first))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and signed sines [n_tokens, 1, head_dim] of `positions` [n_tokens].

        Raises IndexError on a CPU for those that the model does not have.
        """
        if self.angles is None:
            return self._computed(positions)
        self.cover(positions)
        return self.angles.cos.index_select(0, positions), self.angles.signed_sin.index_select(
            0, positions
        )

    def cover(self, positions: Tensor) -> None:
        """Makes the tables, if there are any, long enough for all of `positions` that the model
        has."""
        if self.angles is None:
            return
        longest = min(int(positions.max()) + 1, self._n_positions)
        while (n := len(self.angles.cos)) < longest:
            cos, sin = self._computed(torch.arange(n, min(2 * n, self._n_positions)))
            self.angles.cos = torch.cat((self.angles.cos, cos))
            self.angles.signed_sin = torch.cat((self.angles.signed_sin, sin))

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the angles in float32 and only then rounds them: at position 4,000 a bfloat16
        angle would be off by whole turns."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos().mul_(self._cos_scales), angles.sin_().mul_(self._sin_scales)
        return cos.to(self._dtype), sin.to(self._dtype)


def head_order(config: RotaryConfig) -> Sequence[int] | None:
    """Returns the stored place of each element of a head of queries or keys, [head_dim].

    None if they are stored as they are turned.

    In this order the two elements of each pair that turns are half a head apart, as
    `Ops.rotary` has them, and what does not turn is at the end of each half. Scores do not
    depend on the order, as long as queries and keys have the same.
    """
    n_turned, n_all = config.rotary_dim, config.head_dim
    if config.turns_neighbours:
        first, second = range(0, n_turned, 2), range(1, n_turned, 2)
    else:
        first, second = range(n_turned // 2), range(n_turned // 2, n_turned)
    middle = (n_turned + n_all) // 2
    order = (*first, *range(n_turned, middle), *second, *range(middle, n_all))
    return None if order == tuple(range(n_all)) else order


def inverse_frequencies(rope: RopeConfig, n_turned: int, max_positions: int) -> Tensor:
    """Returns the radians per position of each pair of the `n_turned` elements, [n_turned / 2].

    They are float32, for a model whose sequences have `max_positions` tokens at most.
    """
    exponents = torch.arange(0, n_turned, 2, dtype=torch.float32) / n_turned
    periods = rope.rope_theta**exponents  # positions per radian
    if rope.frequency_factors is not None:
        periods *= torch.tensor(rope.frequency_factors)
    if rope.rope_type == "linear":
        return 1.0 / periods / _given(rope.factor)
    if rope.rope_type == "proportional":
        n_waves = int(rope.partial_rotary_factor * n_turned // 2)
        is_still = torch.arange(len(periods)) >= n_waves
        return (1.0 / periods).masked_fill(is_still, 0.0) / (rope.factor or 1.0)
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, 1.0 / periods)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, periods)
    if rope.rope_type == "longrope":
        return 1.0 / (_longrope_factors(rope, max_positions) * periods)
    return 1.0 / periods


def attention_scale(rope: RopeConfig) -> float:
    """Returns what the turned elements of queries and of keys are each multiplied by."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "yarn":
        factor = _given(rope.factor)
        if rope.mscale and rope.mscale_all_dim:
            return yarn_scale(factor, rope.mscale) / yarn_scale(factor, rope.mscale_all_dim)
        return yarn_scale(factor, 1.0)
    if rope.rope_type == "longrope" and _given(rope.factor) > 1:
        original = _given(rope.original_max_position_embeddings)
        return math.sqrt(1 + math.log(_given(rope.factor)) / math.log(original))
    return 1.0


def yarn_scale(factor: float, mscale: float) -> float:
    """Returns by how much "yarn" sharpens scores of a context that is stretched by `factor`, in the
    strength `mscale`: as the factor of queries and of keys."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    factor = _given(rope.factor)
    low, high = _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    n_waves = _given(rope.original_max_position_embeddings) * frequencies / (2 * math.pi)
    share_kept = ((n_waves - low) / (high - low)).clamp(0, 1)
    return (1 - share_kept) * frequencies / factor + share_kept * frequencies


def _yarn_frequencies(rope: RopeConfig, periods: Tensor) -> Tensor:
    n_turned = 2 * len(periods)
    original = _given(rope.original_max_position_embeddings)

    def wave_with(n_turns: float) -> float:
        """The number of the wave that turns so often in the original context, with a fraction."""
        turns_of_first = original / (2 * math.pi)
        return n_turned * math.log(turns_of_first / n_turns) / (2 * math.log(rope.rope_theta))

    first, last = wave_with(rope.beta_fast or 32), wave_with(rope.beta_slow or 1)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n_turned - 1)
    if first == last:
        last += 0.001  # as the oracle has it, since a ramp has some length
    waves = torch.arange(len(periods), dtype=torch.float32)
    share_stretched = ((waves - first) / (last - first)).clamp(0, 1)
    stretched = 1.0 / (_given(rope.factor) * periods)
    return stretched * share_stretched + 1.0 / periods * (1 - share_stretched)


def _longrope_factors(rope: RopeConfig, max_positions: int) -> Tensor:
    is_long = max_positions > _given(rope.original_max_position_embeddings)
    factors = rope.long_factor if is_long else rope.short_factor
    if factors is None:
        raise ValueError("factors are missing that RopeConfig guarantees for longrope")
    return torch.tensor(factors, dtype=torch.float32)


def _given(value: float | None) -> float:
    if value is None:
        raise ValueError("a rotary setting is missing that RopeConfig guarantees for its type")
    return value
