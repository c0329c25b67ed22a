"""The K/V groups of a model: layers whose keys and values are kept for the same tokens.

A layer with a window never reads tokens before the window. The blocks of such tokens can be reused
while other layers still need their own blocks. A block belongs to one group, and has a place for
each layer of the group on a stage. Layers with equal windows are one kind, and each group has about
as many layers as the rarest kind. So a block has about the same number of bytes in every group. All
groups take their blocks from the same memory, and no part of it is reserved for a group.

    gpt-oss 20B   12 layers with a window, 12 without     2 groups of 12
    Gemma 3 27B   52 layers with a window, 10 without     1 group of 10, and 6 of 8 or 9

The layers of a kind are assigned in rotation to the groups of this kind, so that every stage has
about equally many layers of each group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.models.config import ModelConfig

_MAX_GROUPS = 8
"""Approximate limit for the number of groups. Every group needs block tables of its own."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The K/V groups of a model, and the group of each layer."""

    windows: tuple[int | None, ...]
    """For each group, the number of last tokens whose blocks must be kept. None means all tokens.
    Groups with None come first."""
    of_layers: tuple[int, ...]
    """For each layer of the model, the index of its group."""

    @classmethod
    def of(cls, config: ModelConfig) -> KVGroups:
        """Returns the groups of a model.

        There is one group if all layers that store keys and values have equal windows. There is
        also one group if the sizes of the keys and values differ between layers, because blocks of
        different groups would then differ in size.
        """
        sizes = {kv for kv in config.layer_kv if kv.n_heads}
        kinds = Counter(
            window for window, kv in zip(_kept(config), config.layer_kv, strict=True) if kv.n_heads
        )
        if len(kinds) < 2 or len(sizes) > 1:
            window = next(iter(kinds)) if len(kinds) == 1 else None
            return cls((window,), (0,) * config.n_layers)
        n_layers = max(min(kinds.values()), -(-kinds.total() // _MAX_GROUPS))  # layers of a group
        first: dict[int | None, int] = {}
        windows: list[int | None] = []
        for window in sorted(kinds, key=lambda window: window or 0):
            first[window] = len(windows)
            windows += [window] * -(-kinds[window] // n_layers)
        n_before: Counter[int | None] = Counter()
        groups: list[int] = []
        for i, (window, kv) in enumerate(zip(_kept(config), config.layer_kv, strict=True)):
            source = config.kv_sources[i]
            if kv.n_heads:
                groups.append(first[window] + n_before[window] % windows.count(window))
                n_before[window] += 1
            else:  # stores nothing, and may attend to the keys of an earlier layer
                groups.append(groups[source] if source < i else 0)
        return cls(tuple(windows), tuple(groups))

    def windows_on(self, layers: range, config: ModelConfig) -> Sequence[Sequence[int | None]]:
        """Returns, for each group, the distinct windows of the group's layers on a stage. If the
        stage has no layer of a group, the result has the window of the group."""
        on_stage: list[dict[int | None, None]] = [{} for _ in self.windows]
        for i in layers:
            on_stage[self.of_layers[i]][config.layer_windows[i]] = None
        return [
            tuple(found) or (window,) for found, window in zip(on_stage, self.windows, strict=True)
        ]


def _kept(config: ModelConfig) -> list[int | None]:
    """Returns the window of each layer. A window that is at least as long as the longest sequence
    becomes None, which means no window."""
    longest = config.max_position_embeddings
    return [
        None if window is None or window >= longest else window for window in config.layer_windows
    ]
