"""Adapters that are added to a model between iterations: the tokens are those of a model that has
them from the start, and what is computed comes from the bytes of the digest."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.models.adapters.adapter import Adapter
from services.worker.models.adapters.adapter_config import AdapterError
from tests.adapters import sizes_of, write_adapter
from tests.checkpoints import Oracle, write_family_checkpoint
from tests.worker.models.adapters.test_adapted_model import FAMILIES, LAYOUTS, follow
from tests.worker.pipeline import Pipeline, load


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "base"
    write_family_checkpoint(directory, FAMILIES["llama"][0])
    return directory


@pytest.fixture(scope="module")
def adapters(base: Path) -> list[Adapter]:
    sizes = sizes_of(Oracle(base).model)
    chosen = [FAMILIES["llama"][1], ("q_proj", "v_proj"), ("gate_proj", "lm_head")]
    return [
        Adapter(f"a{i}", write_adapter(base.parent / str(i), sizes, each, rank=3 + 4 * i, seed=i))
        for i, each in enumerate(chosen)
    ]


@pytest.mark.parametrize(("n_stages", "tp_size"), LAYOUTS)
def test_tokens_are_those_of_a_model_that_has_the_adapters_from_the_start(
    base: Path, adapters: list[Adapter], n_stages: int, tp_size: int
) -> None:
    layout: dict[str, Any] = {"n_stages": n_stages, "tp_size": tp_size}
    first, *others = adapters
    started = Pipeline(base, dtype="float32", adapters=adapters, **layout)
    expected = [follow(started, one, 4) for one in (None, *adapters)]
    grown = Pipeline(base, dtype="float32", adapters=[first], max_loaded_adapters=2, **layout)
    for index, one in enumerate(others, 1):
        grown.add_adapter(one, index)
    for own, (logits, tokens) in zip((None, *adapters), expected, strict=True):
        own_logits, own_tokens = follow(grown, own, 4)
        assert torch.equal(own_logits, logits)
        assert own_tokens == tokens


def test_adapters_take_each_others_places(base: Path, adapters: list[Adapter]) -> None:
    pipeline = Pipeline(base, dtype="bfloat16", max_loaded_adapters=1)
    alone, _ = follow(pipeline, None, 3)
    seen: dict[str, torch.Tensor] = {}
    for _ in range(2):
        for one in adapters:
            pipeline.add_adapter(one, 0)
            logits, _ = follow(pipeline, one, 3)
            assert torch.equal(seen.setdefault(one.name, logits), logits)
            pipeline.drop_adapter(one)
    assert torch.equal(follow(pipeline, None, 3)[0], alone)
    assert len({tuple(one.flatten().tolist()) for one in seen.values()}) == len(adapters)


def test_files_that_change_while_they_are_read_are_refused(base: Path, tmp_path: Path) -> None:
    model = load(base, dtype="float32", takes_adapters=True)
    assert model.adaptable is not None
    sizes = sizes_of(Oracle(base).model)
    write_adapter(tmp_path / "one", sizes, ("q_proj",), seed=1)
    write_adapter(tmp_path / "two", sizes, ("q_proj",), seed=2)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copytree(tmp_path / "one", tmp_path / "own", dirs_exist_ok=True)
        adapter = Adapter("own", tmp_path / "own")
        if name.endswith(".json"):
            write_adapter(tmp_path / "two", sizes, ("q_proj",), alpha=99)
        shutil.copy(tmp_path / "two" / name, tmp_path / "own" / name)
        with pytest.raises(AdapterError, match="adapter own: its files changed"):
            model.adaptable.fit(adapter, 0)


def test_a_model_that_was_loaded_for_no_adapters_takes_none(base: Path) -> None:
    with pytest.raises(RuntimeError, match="for no adapters"):
        load(base, dtype="float32").with_adapters([])
