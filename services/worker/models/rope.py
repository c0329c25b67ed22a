"""The angles of rotary embedding, and the ways in which models stretch their contexts.

These ways are the values of Hugging Face's `rope_type`:

- "linear" divides all frequencies by the factor (Chen et al., 2023).
- "dynamic" raises the base with the length of a sequence beyond `max_position_embeddings`. Such
  sequences are not served, so this value changes nothing.
- "proportional" (Gemma 4) rotates only the first `partial_rotary_factor` of the pairs.
- "llama3" (the Llama 3.1 release) divides only the frequencies with fewer than `low_freq_factor`
  full turns in the original context, keeps the frequencies with more than `high_freq_factor` turns,
  and interpolates in between.
- "yarn" (Peng et al., 2023) is like "llama3" with `beta_slow` and `beta_fast` turns, but
  interpolates linearly over the index of the frequency, and scales the rotated elements.
- "longrope" (Ding et al., 2024) divides each frequency by a separate factor. There are two sets of
  factors: one for sequences within the original context and one for longer sequences.

Keys are stored rotated, and requests with a common prefix share stored keys. So the angle of a
position must not depend on the final length of the sequence. Therefore one set of "longrope"
factors is used for all sequences: the short factors if the model serves at most its original
context, which is the default, and the long factors otherwise (see `served_context.py`). In the
second case, a short sequence is computed as the beginning of a long one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.forms.rotary_angles import Angles
from services.worker.models.rotary_config import RopeConfig, RotaryConfig, yarn_scale

FIRST_POSITIONS = 4096
"""Number of positions for which angles are computed at the start. The tables grow when a sequence
is longer."""


class RotaryEmbedding:
    """The angles of positions, in the form that `Ops.rotary` takes.

    Elements of a head that are not rotated have the angle 0; `head_order` says where these elements
    are. On a CPU the angles are kept in tables, which double in length when a sequence is longer
    than the tables. On other devices the angles are computed for each batch and used by all layers.
    Tables would not work there: the host would have to wait for the positions, and recorded graphs
    would go on reading the memory of tables that have been replaced.
    """

    angles: Angles | None
    """The tables of angles on a CPU, or None on other devices."""

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
        """Returns the cosines and the signed sines [n_tokens, 1, head_dim] of the angles at
        `positions` [n_tokens].

        On a CPU, raises IndexError for positions beyond `max_position_embeddings`.
        """
        if self.angles is None:
            return self._computed(positions)
        self.cover(positions)
        return self.angles.cos.index_select(0, positions), self.angles.signed_sin.index_select(
            0, positions
        )

    def cover(self, positions: Tensor) -> None:
        """Extends the tables on a CPU to all of `positions`, up to the longest position of the
        model. Does nothing on other devices."""
        if self.angles is None:
            return
        longest = min(int(positions.max()) + 1, self._n_positions)
        while (n := len(self.angles.cos)) < longest:
            cos, sin = self._computed(torch.arange(n, min(2 * n, self._n_positions)))
            self.angles.cos = torch.cat((self.angles.cos, cos))
            self.angles.signed_sin = torch.cat((self.angles.signed_sin, sin))

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Computes cosines and signed sines of `positions`.

        The angles are computed in float32, and only the results are rounded: at position 4,000 a
        bfloat16 angle would be off by whole turns.
        """
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos().mul_(self._cos_scales), angles.sin_().mul_(self._sin_scales)
        return cos.to(self._dtype), sin.to(self._dtype)


def head_order(config: RotaryConfig) -> Sequence[int] | None:
    """Returns the stored index of each element of a query or key head, [head_dim], in the order
    that `Ops.rotary` needs.

    Returns None if the stored order already fits. In the needed order the two elements of each
    rotated pair are half a head apart, and elements that are not rotated are at the end of each
    half. Attention scores do not depend on the order, as long as queries and keys have equal
    orders.
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
    """Returns, for each rotated pair of elements, the radians per position, [n_turned / 2] in
    float32. `max_positions` is the number of tokens of the model's longest sequence."""
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
    """Returns the factor by which the rotated elements of both queries and keys are multiplied."""
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
        """Returns the index of the frequency that makes `n_turns` full turns within the original
        context. The index is a real number."""
        turns_of_first = original / (2 * math.pi)
        return n_turned * math.log(turns_of_first / n_turns) / (2 * math.log(rope.rope_theta))

    first, last = wave_with(rope.beta_fast or 32), wave_with(rope.beta_slow or 1)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n_turned - 1)
    if first == last:
        last += 0.001  # as in the reference, since the ramp must have a length
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
