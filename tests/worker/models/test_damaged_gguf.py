"""Damaged headers of GGUF files, of every architecture: each is refused clearly, or can be loaded.

A header is changed in memory: keys are missing or have other values, and tensors are missing or
have other shapes and types.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.gguf.header import GgufHeader, TensorPlace
from services.worker.models import CheckpointError, UnsupportedModel
from services.worker.models.gguf_config import read_gguf_config, read_gguf_header
from services.worker.models.gguf_file import GgufFile
from services.worker.models.registry import build_stage
from tests.checkpoints import write_family_checkpoint
from tests.ggufs import write_gguf
from tests.worker.models.test_gguf_architectures import CONFIGS, CUT

VALUES: tuple[Any, ...] = (
    0, -1, 1, 7, 1 << 40, 0.0, 1.5, float("nan"), float("inf"), "x", True, False, [], [1, 2],
    [True, False], ["x"],
)  # fmt: skip
N_OFTEN, N_SELDOM = 8, 30  # headers of each architecture
DAMAGED = [
    *(pytest.param(name, N_OFTEN, id=name) for name in CUT),
    *(
        pytest.param(name, N_SELDOM, id=f"{name}-more", marks=pytest.mark.thorough)
        for name in CONFIGS
    ),
]


def damaged(header: GgufHeader, rng: random.Random) -> GgufHeader:
    """Returns a header with one or two changes."""
    metadata, tensors = dict(header.metadata), dict(header.tensors)
    for _ in range(rng.randint(1, 2)):
        if rng.random() < 0.6:
            key = rng.choice([key for key in metadata if not key.startswith("general.")])
            if rng.random() < 0.2:
                del metadata[key]
            else:
                metadata[key] = rng.choice(VALUES)
        else:
            name = rng.choice(list(tensors))
            if rng.random() < 0.2:
                del tensors[name]
            else:
                tensors[name] = bent(tensors[name], rng)
    return replace(header, metadata=metadata, tensors=tensors)


def bent(place: TensorPlace, rng: random.Random) -> TensorPlace:
    """Returns a tensor of another shape or type, or at another place."""
    sizes = list(place.shape)
    kind = rng.randrange(5)
    if kind == 0:
        return replace(place, shape=tuple(sizes[1:]))
    if kind == 1:
        return replace(place, shape=(*sizes, rng.choice((0, 1, 3))))
    if kind == 2 and sizes:
        sizes[rng.randrange(len(sizes))] += rng.choice((-1, 1, 1 << 30))
        return replace(place, shape=tuple(sizes))
    if kind == 3:
        return replace(place, type=rng.choice((1, 2, 8, 14, 30, 99)))
    return replace(place, offset=place.offset + rng.choice((4, 1 << 40)))


@pytest.mark.parametrize(("name", "n"), DAMAGED)
def test_a_damaged_header_is_refused_or_can_be_loaded(tmp_path: Path, name: str, n: int) -> None:
    write_family_checkpoint(tmp_path, CONFIGS[name])
    header = read_gguf_header(write_gguf(tmp_path, tmp_path / "model.gguf"))
    rng = random.Random(n)
    refused = []
    for _ in range(n):
        changed = damaged(header, rng)
        try:
            config = read_gguf_config(changed).config
            build_stage(
                config,
                GgufFile(changed, config),
                stage_index=0,
                n_stages=1,
                tp_rank=0,
                tp_size=1,
                dtype=torch.float32,
                device=torch.device("cpu"),
                on_progress=lambda n_done, n_total: None,
                quantization="none",
                activations="exact",
            )
        except (UnsupportedModel, CheckpointError) as error:
            refused.append(str(error))
    assert refused
    assert all("model.gguf" in said for said in refused), refused
