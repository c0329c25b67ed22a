"""Angles of a context that was stretched by YaRN (Peng et al., 2023).

Waves that turn `beta_fast` times or more in the original context stay, those that turn `beta_slow`
times or less become longer by the factor, and those in between are in between by their numbers.
What turns is scaled, for the softmax over more keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.worker.models.config import (
    PositiveFloat,
    PositiveInt,
    RotaryConfig,
    UnsupportedModel,
)
from services.worker.models.layers import RotaryEmbedding


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """The settings of rotary type "yarn", under the names of their keys."""

    rope_theta: PositiveFloat  # base of the wavelengths, above 1
    factor: PositiveFloat  # by how much the context was stretched
    original_max_position_embeddings: PositiveInt  # before stretching, tokens
    beta_fast: PositiveFloat = 32.0  # turns in the original context, as the next
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True  # the ramp between them begins and ends at whole waves
    attention_factor: PositiveFloat | None = None  # of what turns; None: by the paper

    @classmethod
    def fields_of(cls, given: Mapping[str, Any], rope_theta: float) -> Mapping[str, Any]:
        """Returns the fields that rotary settings name; raises UnsupportedModel for others."""
        fields = {key: value for key, value in given.items() if value is not None}
        for key in ("rope_type", "type"):
            fields.pop(key, None)
        unknown = set(fields) - set(cls.__slots__)
        if unknown:
            raise UnsupportedModel(f"config.json: unknown rotary settings {sorted(unknown)}")
        return {"rope_theta": rope_theta, **fields}

    def check(self) -> None:
        """Raises ValueError for waves that do not become longer, or have no number."""
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta ({self.rope_theta}) is not above 1, as yarn needs it")
        for key, n_turns in (("beta_fast", self.beta_fast), ("beta_slow", self.beta_slow)):
            if not math.isfinite(self._wave(n_turns, head_dim=1)):
                raise ValueError(f"{key} ({n_turns}) is no number of turns")

    @property
    def scale(self) -> float:
        """What turned queries and keys are each multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Returns the radians per position of each pair of elements, [head_dim / 2], float32."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        periods = self.rope_theta**exponents  # positions per radian
        first, last = self._wave(self.beta_fast, head_dim), self._wave(self.beta_slow, head_dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        if first == last:
            last += 0.001  # as the oracle has it: a ramp has some length
        waves = torch.arange(head_dim // 2, dtype=torch.float32)
        share_stretched = ((waves - first) / (last - first)).clamp(0, 1)
        stretched = 1.0 / (self.factor * periods)
        return stretched * share_stretched + 1.0 / periods * (1 - share_stretched)

    def _wave(self, n_turns: float, head_dim: int) -> float:
        """Returns the number of the wave that turns so often in the original context."""
        turns_of_first = self.original_max_position_embeddings / (2 * math.pi)
        return head_dim * math.log(turns_of_first / n_turns) / (2 * math.log(self.rope_theta))


class YarnEmbedding(RotaryEmbedding):
    """The angles of all positions of a stretched context."""

    def __init__(
        self, yarn: YarnConfig, config: RotaryConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Computes the angles in float32 and only then rounds them to `dtype`."""
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = positions[:, None, None] * yarn.inverse_frequencies(config.head_dim)
        cos, sin = ((half * yarn.scale).to(device, dtype) for half in (angles.cos(), angles.sin()))
        self.cos = torch.cat((cos, cos), -1)
        self.signed_sin = torch.cat((-sin, sin), -1)
