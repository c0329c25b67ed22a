"""How a checkpoint pools, as its files say it, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from services.common.pooling import Pooling, PoolingSetting, pooling_in
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import UnsupportedModel
from services.worker.models.pooling_files import read_pooling
from tests.checkpoints import SMALL
from tests.pooling import write_embedder, write_pooling, write_reranker

DECODER = {"architectures": ["LlamaForCausalLM"]}


def pooling(directory: Path, setting: PoolingSetting = "") -> Pooling | None:
    return read_pooling(directory, DECODER, setting, hidden_size=48)


def change(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
@pytest.mark.parametrize("normalises", [True, False])
def test_the_files_of_sentence_transformers_are_read(
    tmp_path: Path, kind: str, normalises: bool
) -> None:
    write_pooling(tmp_path, kind, size=48, normalises=normalises)
    read = pooling(tmp_path)
    assert read is not None
    assert (read.kind, read.is_normalised, read.generates) == (kind, normalises, False)
    assert pooling_in(read.to_traits()) == read


def test_newer_files_name_the_kind(tmp_path: Path) -> None:
    write_pooling(tmp_path, "cls", size=48)
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"embedding_dimension": 48, "pooling_mode": "lasttoken"}))
    read = pooling(tmp_path)
    assert read is not None
    assert read.kind == "last"


def test_a_setting_pools_a_model_that_answers(tmp_path: Path) -> None:
    assert pooling(tmp_path) is None
    read = pooling(tmp_path, "mean")
    assert read == Pooling(kind="mean", n_values=48, is_normalised=True, generates=True)


def test_a_setting_agrees_with_the_files(tmp_path: Path) -> None:
    write_pooling(tmp_path, "last", size=48, normalises=False)
    read = pooling(tmp_path, "last")
    assert read == Pooling(kind="last", n_values=48, is_normalised=False, generates=True)
    others: tuple[PoolingSetting, ...] = ("mean", "cls", "yes-no")
    for other in others:
        with pytest.raises(UnsupportedModel, match=rf"pooling: {other} .*modules\.json.* last"):
            pooling(tmp_path, other)
    dense = [{"type": f"m.{name}"} for name in ("Transformer", "Pooling", "Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(dense))
    with pytest.raises(UnsupportedModel, match=r"pooling: last .*modules\.json.* Dense"):
        pooling(tmp_path, "last")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pooling_mode_cls_token": True}, "pooling_mode_cls_token, pooling_mode_lasttoken"),
        ({"pooling_mode_lasttoken": False}, "of no kind"),
        ({"pooling_mode": "weightedmean"}, "weightedmean is not served"),
        ({"word_embedding_dimension": 47}, "vectors of 47 elements, not of 48"),
    ],
)
def test_other_pooling_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    write_pooling(tmp_path, "last", size=48)
    file = tmp_path / "1_Pooling" / "config.json"
    change(file, **keys)
    config = json.loads(file.read_text())
    file.write_text(json.dumps(dict(sorted(config.items()))))
    with pytest.raises(UnsupportedModel, match=message):
        pooling(tmp_path)


def test_means_without_the_prompt_are_refused(tmp_path: Path) -> None:
    write_pooling(tmp_path, "mean", size=48)
    change(tmp_path / "1_Pooling" / "config.json", include_prompt=False)
    with pytest.raises(UnsupportedModel, match="include_prompt"):
        pooling(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["Transformer", "Pooling", "Dense", "Normalize"], "Dense"),
        (["CLIPModel"], "CLIPModel"),
        (["Transformer"], "Transformer are not served"),
    ],
)
def test_other_modules_are_refused(tmp_path: Path, modules: list[str], message: str) -> None:
    write_pooling(tmp_path, "last", size=48)
    listed = [{"type": f"sentence_transformers.models.{name}"} for name in modules]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(UnsupportedModel, match=message):
        pooling(tmp_path)


def test_the_case_of_texts_is_not_a_matter_of_workers(tmp_path: Path) -> None:
    """As in BGE's files."""
    write_pooling(tmp_path, "cls", size=48)
    file = tmp_path / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": 512, "do_lower_case": True}))
    assert pooling(tmp_path) is not None


@pytest.mark.parametrize("content", ["{}", "[1]", "nonsense"])
def test_a_broken_list_of_modules_is_refused(tmp_path: Path, content: str) -> None:
    write_pooling(tmp_path, "last", size=48)
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(UnsupportedModel, match=r"modules\.json"):
        pooling(tmp_path)


def test_a_model_without_head_needs_pooling(tmp_path: Path) -> None:
    write_embedder(tmp_path, LlamaConfig(**SMALL), "last")
    assert open_checkpoint(tmp_path).pooling is not None
    (tmp_path / "modules.json").unlink()
    named = open_checkpoint(tmp_path, pooling="mean").pooling
    assert named is not None
    assert not named.generates
    with pytest.raises(UnsupportedModel, match="'LlamaModel' has no head"):
        open_checkpoint(tmp_path)


def test_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    write_embedder(tmp_path, LlamaConfig(**SMALL), "mean")
    change(tmp_path / "config.json", is_causal=False)
    with pytest.raises(UnsupportedModel, match="is_causal"):
        open_checkpoint(tmp_path)


def test_classification_heads_have_one_label_and_an_activation(tmp_path: Path) -> None:
    write_reranker(tmp_path, Qwen3Config(**SMALL, head_dim=8))
    read = open_checkpoint(tmp_path).pooling
    assert read == Pooling(kind="last", n_values=1, head="classification", has_sigmoid=True)
    activation = {"activation_fn": "torch.nn.modules.linear.Identity"}
    change(tmp_path / "config.json", sentence_transformers=activation)
    read = open_checkpoint(tmp_path).pooling
    assert read is not None
    assert not read.has_sigmoid
    change(tmp_path / "config.json", id2label={"0": "a", "1": "b"})
    with pytest.raises(UnsupportedModel, match="2 labels"):
        open_checkpoint(tmp_path)
    change(tmp_path / "config.json", id2label=1)
    with pytest.raises(UnsupportedModel, match="id2label"):
        open_checkpoint(tmp_path)
    change(tmp_path / "config.json", id2label={"0": "a", "1": "b"})
    with pytest.raises(UnsupportedModel, match="pooling: last"):
        open_checkpoint(tmp_path, pooling="last")


def test_yes_and_no_must_be_tokens(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="yes-no needs the tokens yes and no"):
        pooling(tmp_path, "yes-no")
