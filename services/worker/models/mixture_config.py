"""The fields by which configurations say how many experts a layer has and chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from services.worker.models.config import Count, PositiveInt
from services.worker.models.rotary_config import RotaryConfig


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(RotaryConfig):
    """A configuration whose layers choose some of their experts for each token."""

    experts_key: ClassVar[str] = "num_experts"
    """Key of `config.json` with the number of experts."""

    n_experts: Count
    n_chosen: PositiveInt

    def check(self) -> None:
        super().check()
        if self.n_chosen > self.n_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.n_chosen}) is more than {self.experts_key} "
                f"({self.n_experts})"
            )
