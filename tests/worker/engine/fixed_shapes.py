"""Recorded graphs without a GPU: attention whose shapes do not depend on what is in a batch, and a
graph that calls its function again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import TORCH, AttentionForm, Ops
from kernels.forms.attention import PLAIN
from kernels.ops import AttentionPlan, Ints
from kernels.upload import Uploads
from services.worker.models import StageModel
from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.config_file import read_config
from services.worker.models.directory_files import DirectoryFiles
from services.worker.models.registry import FAMILIES
from services.worker.models.stage_place import StagePlace, layer_range
from services.worker.models.weights import WantedTensors

CPU = torch.device("cpu")


class RepeatedCall:
    """A graph that computes anew, from whatever its tensors hold by then."""

    def __init__(self) -> None:
        self._function: Callable[[], object] | None = None
        self.n_replays = 0

    def capture(self, function: Callable[[], object]) -> None:
        function()
        self._function = function

    def replay(self) -> None:
        assert self._function is not None
        self._function()
        self.n_replays += 1


@dataclass(frozen=True)
class FixedDecodes(AttentionPlan):
    """A plan for decodes, which are spans of one token each. Only tensors have the positions of the
    keys, so shapes do not depend on them."""

    last_positions: Tensor  # [n_spans]
    block_tables: Tensor  # [n_spans, n_columns]


def plan_attention(
    start_positions: Ints,
    n_tokens: Ints,
    *,
    block_tables: Ints,
    uploads: Uploads,
    has_fixed_shape: bool = False,
    **others: Any,
) -> Any:
    """Implements `Ops.plan_attention`."""
    if not has_fixed_shape:
        return TORCH.plan_attention(
            start_positions, n_tokens, block_tables=block_tables, uploads=uploads, **others
        )
    assert (n_tokens == 1).all()
    return FixedDecodes(uploads.add(start_positions), uploads.add(block_tables))


def attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    form: AttentionForm = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Implements `Ops.attention` over all blocks in the block tables. Keys that do not belong to a
    sequence get the weight zero."""
    if not isinstance(plan, FixedDecodes):
        return TORCH.attention(q, key_cache, value_cache, plan, form, sinks)
    keys, values = (cache[plan.block_tables].flatten(1, 2) for cache in (key_cache, value_cache))
    n_shared = q.shape[1] // keys.shape[2]
    keys, values = (each.repeat_interleave(n_shared, 2) for each in (keys, values))
    scores = torch.einsum("shd,skhd->shk", q, keys) * (form.scale or q.shape[2] ** -0.5)
    position = torch.arange(keys.shape[1])
    is_hidden = position > plan.last_positions[:, None]
    if form.window is not None:
        is_hidden |= position <= plan.last_positions[:, None] - form.window
    scores = scores.masked_fill(is_hidden[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None].expand(len(q), -1, 1)), -1)
    weights = scores.softmax(-1)[:, :, : len(position)]
    return torch.einsum("shk,skhd->shd", weights, values)


OPS = replace(TORCH, plan_attention=plan_attention, attention=attention, has_fixed_shapes=True)


def load_fixed(
    directory: Path,
    *,
    stage_index: int = 0,
    n_stages: int = 1,
    tp_rank: int = 0,
    tp_size: int = 1,
    ops: Ops = OPS,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> StageModel:
    """A stage that computes with operations whose shapes are fixed."""
    config = read_config(directory)
    family = FAMILIES[config.architecture]
    layers = layer_range(config.n_layers, stage_index, n_stages)
    place = StagePlace.of(config, layers, None, ops=ops, tp_rank=tp_rank, tp_size=tp_size)
    wanted = WantedTensors(tp_rank, tp_size)
    family(config, place, source=wanted, dtype=dtype, device=device)
    source = CheckpointTensors(
        DirectoryFiles(directory),
        wanted,
        dtype=dtype,
        device=device,
        on_progress=lambda n_done, n_total: None,
        quantization="none",
    )
    return family(config, place, source=source, dtype=dtype, device=device)
