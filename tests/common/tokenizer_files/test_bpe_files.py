"""`vocab.json` with `merges.txt`, against the tokenizers that `transformers` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from services.frontend.text.tokenizer import Tokenizer
from tests.common.tokenizer_files.strange_texts import STRANGE, TRAINING

GPT2 = {"model_type": "gpt2"}
N_TRAINED = 320
BYTES = tokenizers.pre_tokenizers.ByteLevel.alphabet()


def write(
    directory: Path, model: dict[str, Any], specials: list[str], **files: object
) -> transformers.PreTrainedTokenizerBase:
    """Writes a vocabulary in which special tokens come first, and returns the oracle."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=N_TRAINED, special_tokens=specials, initial_alphabet=BYTES, show_progress=False
    )
    trained.train_from_iterator(TRAINING, trainer)
    trained.model.save(str(directory))
    for name, content in {"config": model, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return transformers.AutoTokenizer.from_pretrained(directory)


def assert_as(directory: Path, oracle: Any) -> Tokenizer:
    ours = Tokenizer.from_directory(directory)
    for text in STRANGE:
        tokens = ours.to_tokens(text)
        assert list(tokens) == oracle.encode(text), text
        expected = oracle.decode(tokens, skip_special_tokens=True)
        assert ours.to_text(tokens) == expected
    return ours


def test_gpt2_as_published(tmp_path: Path) -> None:
    """No file names a class or a special token."""
    oracle = write(tmp_path, GPT2, ["<|endoftext|>"], tokenizer_config={"model_max_length": 1024})
    ours = assert_as(tmp_path, oracle)
    assert ours.special_tokens(["<|endoftext|>"]) == {"<|endoftext|>": 0}


OPT_CONFIG = {
    "add_bos_token": True,
    "add_prefix_space": False,
    "bos_token": {"__type": "AddedToken", "content": "</s>", "normalized": True},
    "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": True},
    "pad_token": "<pad>",
    "unk_token": {"__type": "AddedToken", "content": "</s>", "normalized": True},
    "tokenizer_class": "GPT2Tokenizer",
}


def test_opt_as_published(tmp_path: Path) -> None:
    """A token comes in front, and `<s>` is not special."""
    oracle = write(
        tmp_path,
        {"model_type": "opt"},
        ["<s>", "<pad>", "</s>", "<unk>"],
        tokenizer_config=OPT_CONFIG,
        special_tokens_map={"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"},
    )
    ours = assert_as(tmp_path, oracle)
    assert ours.to_tokens("a")[0] == 2
    assert set(ours.special_tokens(["<s>", "<pad>", "</s>"])) == {"<pad>", "</s>"}


def added(content: str, **form: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **plain, **form}


START, END, TOOL = "<|im_start|>", "<|im_end|>", "<tool>"
ADDED = {START: N_TRAINED, END: N_TRAINED + 1, TOOL: N_TRAINED + 2}
DECODER = {
    str(N_TRAINED): added(START, special=True, rstrip=True),
    str(N_TRAINED + 1): added(END, special=True),
    str(N_TRAINED + 2): added(TOOL),
}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": DECODER, "eos_token": END}},
        {
            "tokenizer_config": {"eos_token": END},
            "added_tokens": ADDED,
            "special_tokens_map": {"additional_special_tokens": [START], "eos_token": END},
        },
    ],
    ids=["decoder", "older"],
)
def test_added_tokens_are_those_of_all_files(tmp_path: Path, files: dict[str, Any]) -> None:
    files["tokenizer_config"]["tokenizer_class"] = "Qwen2Tokenizer"
    oracle = write(tmp_path, {"model_type": "qwen2"}, ["<|endoftext|>"], **files)
    ours = assert_as(tmp_path, oracle)
    assert ours.special_tokens(ADDED) == {START: N_TRAINED, END: N_TRAINED + 1}
    text = f"{START}  a {END}  {TOOL}b"
    assert list(ours.to_tokens(text)) == oracle.encode(text)


def test_a_prefix_space_is_that_of_the_configuration(tmp_path: Path) -> None:
    config = {"add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"}
    assert_as(tmp_path, write(tmp_path, GPT2, ["<|endoftext|>"], tokenizer_config=config))


@pytest.mark.parametrize("begin", ["", "#version: 0.2\n", "#version: 0.2\r\n\n"], ids=repr)
def test_merges_have_a_version_or_none(tmp_path: Path, begin: str) -> None:
    """The first merge counts if it is no version; a merge of `#` is none."""
    vocab = {character: place for place, character in enumerate(["#", "##", "###"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text(f"{begin}# #\n## #\n", newline="")
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert Tokenizer.from_directory(tmp_path).to_tokens("##### #") == (1, 2, 0)


WRONG: dict[str, tuple[str, str, str]] = {
    "pair": ("merges.txt", "#version\na b\na\n", "line 3 is no pair: 'a'"),
    "three": ("merges.txt", "a b c\n", "line 1 is no pair"),
    "unknown": ("merges.txt", "a q\n", "is broken"),
    "number": ("vocab.json", '{"a": "1"}', "without a number"),
    "twice": ("vocab.json", '{"a": 1, "b": 1}', "two tokens with one number"),
    "added": ("added_tokens.json", '{"c": 1}', "added token 'c' has the number of another"),
    "added-kind": ("added_tokens.json", '{"c": []}', "vocab.json"),
    "class": (
        "tokenizer_config.json",
        '{"tokenizer_class": "CLIPTokenizer"}',
        "how CLIP's tokenizer divides texts is in no file; make a tokenizer.json",
    ),
}


@pytest.mark.parametrize(("file", "content", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    (tmp_path / "config.json").write_text(
        "{}" if file == "tokenizer_config.json" else '{"model_type": "gpt2"}'
    )
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_a_vocabulary_without_merges_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        Tokenizer.from_directory(tmp_path)
