"""The fields by which configurations say which layers attend to a window of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.models.config import PositiveInt
from services.worker.models.rotary_config import RotaryConfig


@dataclass(frozen=True, kw_only=True)
class LayerWindows:
    """Part of a configuration: each layer has a window of its own, or none."""

    windows: tuple[PositiveInt | None, ...]

    @property
    def layer_windows(self) -> Sequence[int | None]:
        return self.windows


@dataclass(frozen=True, kw_only=True)
class EqualWindowsConfig(RotaryConfig):
    """A configuration with one window for all layers, or none."""

    window: PositiveInt | None

    @property
    def layer_windows(self) -> Sequence[int | None]:
        return (self.window,) * self.n_layers
