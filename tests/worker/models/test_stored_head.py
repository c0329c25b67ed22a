"""The head that a file has counts, also if the configuration says that it is the embedding."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma2Config, GPT2Config, PreTrainedConfig, Qwen2Config

from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.stored_head import EMBEDDING, OWN
from tests.checkpoints import SMALL, Oracle, edit_config, write_checkpoint, write_family_checkpoint
from tests.worker.models.test_registry import last_logits

TOKENS = [5, 9, 100, 3]
Tensors = dict[str, Tensor]


def change(directory: Path, edit: Callable[[Tensors], Tensors]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, **edit(tensors)}, path, {"format": "pt"})


def head_beside(embedding: str, factor: float) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {"lm_head.weight": tensors[embedding].flip(0) * factor}


FAMILIES: dict[str, tuple[PreTrainedConfig, str]] = {
    "qwen2": (Qwen2Config(**SMALL, tie_word_embeddings=True), "model.embed_tokens.weight"),
    "gemma2": (Gemma2Config(**SMALL, head_dim=8), "model.embed_tokens.weight"),
    "gpt2": (GPT2Config(vocab_size=199, n_embd=48, n_layer=2, n_head=4), "transformer.wte.weight"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_differs_counts(tmp_path: Path, family: str) -> None:
    config, embedding = FAMILIES[family]
    change(write_family_checkpoint(tmp_path, config), head_beside(embedding, 0.5))
    assert open_checkpoint(tmp_path).derived["head"].value == OWN
    expected = Oracle(tmp_path).logits(TOKENS)[-1]
    torch.testing.assert_close(last_logits(tmp_path, TOKENS)[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("flag", [True, None, False])
def test_the_flag_is_the_oracles_if_it_is_true_false_or_missing(
    tmp_path: Path, flag: bool | None
) -> None:
    write_checkpoint(tmp_path)  # with a head
    edit_config(tmp_path, remove=("tie_word_embeddings",))
    if flag is not None:
        edit_config(tmp_path, tie_word_embeddings=flag)
    assert open_checkpoint(tmp_path).derived["head"].value == OWN
    expected = Oracle(tmp_path).logits(TOKENS)[-1]
    torch.testing.assert_close(last_logits(tmp_path, TOKENS)[0], expected, rtol=0, atol=1e-4)


def test_a_head_that_is_stored_twice_is_kept_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    opened = open_checkpoint(tmp_path)
    assert opened.derived["head"].value == EMBEDDING
    change(tmp_path, lambda it: {"lm_head.weight": it["model.embed_tokens.weight"].clone()})
    again = open_checkpoint(tmp_path)
    assert again.derived["head"].value == EMBEDDING
    assert again.config == opened.config
    change(tmp_path, lambda it: {"lm_head.weight": it["lm_head.weight"].bfloat16()})
    assert open_checkpoint(tmp_path).derived["head"].value == OWN
