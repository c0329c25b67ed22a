"""The tokens that end an output, whichever file names them."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.derived import Derived
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.ends_of_turn import ends_of_turn
from tests.checkpoints import edit_config, write_checkpoint
from tests.common.test_tokenizer_config import SPECIAL_A, write

NAMED = Derived(256, "tokenizer_config.json: eos_token <a>")
CONFIG, GENERATION = "config.json: eos_token_id", "generation_config.json: eos_token_id"


@pytest.mark.parametrize(
    ("config", "generation", "named", "ends", "source"),
    [
        ({"eos_token_id": 2}, {}, None, (2,), CONFIG),
        ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, None, (3, 4), GENERATION),
        ({"eos_token_id": [2, 5]}, {"eos_token_id": None}, None, (2, 5), CONFIG),
        ({"eos_token_id": 2}, {}, NAMED, (2, 256), f"{CONFIG}; {NAMED.source}"),
        ({}, {"eos_token_id": [3, 256]}, NAMED, (3, 256), GENERATION),
        ({}, {}, NAMED, (256,), NAMED.source),
        ({"eos_token_id": None}, {}, NAMED, (256,), NAMED.source),
        ({}, {}, None, (7,), "default of the family, since no file has eos_token_id"),
        ({"eos_token_id": None}, {}, None, (), "no file names a token"),
        ({}, {"eos_token_id": []}, None, (), GENERATION),
    ],
)
def test_generation_config_replaces_config_and_the_tokenizers_end_is_one_too(
    config: Any, generation: Any, named: Derived[int] | None, ends: tuple[int, ...], source: str
) -> None:
    assert ends_of_turn(config, generation, named, (7,)) == Derived(ends, source)


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config": {"eos_token": "<a>"}}, 256),
        ({"tokenizer_config": {"eos_token": "<c>", "added_tokens_decoder": {
            "257": {"content": "<c>", "special": True}}}}, 257),
        ({"special_tokens_map": {"eos_token": {"content": "<a>"}}}, 256),
        ({"tokenizer_config": {"eos_token": "<new>"}}, 257),
        ({"tokenizer_config": {"eos_token": None}}, None),
    ],
    ids=str,
)  # fmt: skip
def test_an_end_that_only_the_tokenizer_names_ends_outputs(
    tmp_path: Path, files: dict[str, Any], end: int | None
) -> None:
    write_checkpoint(tmp_path, vocab_size=258)
    write(tmp_path, [SPECIAL_A], **files)
    ends = (2,) if end is None else (2, end)
    opened = open_checkpoint(tmp_path)
    assert opened.config.eos_token_ids == opened.derived["ends of turn"].value == ends


def test_without_a_tokenizer_the_configuration_names_the_ends(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<a>"}))
    assert open_checkpoint(tmp_path).config.eos_token_ids == (2,)
    edit_config(tmp_path, remove=("eos_token_id",))
    (tmp_path / "generation_config.json").unlink()
    assert open_checkpoint(tmp_path).config.eos_token_ids == (2,)  # LlamaConfig's own default
