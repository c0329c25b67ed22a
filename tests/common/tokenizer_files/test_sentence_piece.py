"""`tokenizer.model`, against the library `sentencepiece` that wrote it, and `transformers`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from services.frontend.text.incremental_text import IncrementalText
from services.frontend.text.tokenizer import Tokenizer
from tests.common.tokenizer_files.strange_texts import STRANGE, TRAINING

LLAMA: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 400,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}
GEMMA = {
    **LLAMA,
    "add_dummy_prefix": False,
    "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3,
    "user_defined_symbols": ["<start_of_turn>", "▁▁", "▁▁▁▁", "\n\n", "<h1>"],
}  # fmt: skip
UNIGRAM = {"model_type": "unigram", "vocab_size": 120}
UNIGRAM_BYTES = {"model_type": "unigram", "vocab_size": 400, "byte_fallback": True}
NFKC = {**LLAMA, "normalization_rule_name": "nfkc", "remove_extra_whitespaces": True}


def write(directory: Path, options: dict[str, Any]) -> sentencepiece.SentencePieceProcessor:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING),
        model_writer=trained,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
        **options,
    )
    (directory / "tokenizer.model").write_bytes(trained.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


MODELS = {"llama": LLAMA, "gemma": GEMMA, "unigram": UNIGRAM, "unigram-bytes": UNIGRAM_BYTES,
          "nfkc": NFKC}  # fmt: skip


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_texts_have_the_tokens_of_the_library(tmp_path: Path, options: dict[str, Any]) -> None:
    oracle = write(tmp_path, options)
    ours = Tokenizer.from_directory(tmp_path)
    for text in STRANGE:
        if "<s>" in text or "\x00" in text:
            continue  # the library does not take the names of control tokens, and ends at zeros
        unlike = (" ", "▁") if options is LLAMA else "▁" if options is NFKC else "none"
        if text.startswith(unlike):
            continue  # `transformers` is followed, see below
        if "\u0323" in text and options.get("normalization_rule_name") != "identity":
            continue  # `tokenizers` normalizes each cluster of characters by itself
        expected = [oracle.bos_id(), *oracle.encode(text)]
        assert list(ours.to_tokens(text)) == expected, text
        if "byte_fallback" in options:
            streamed = IncrementalText(ours)
            found = "".join([streamed.feed(token) for token in expected]) + streamed.flush()
            assert found == oracle.decode(expected[1:]), text


@pytest.mark.parametrize("legacy", [None, False, True])
def test_what_follows_a_special_token_has_the_space_of_transformers(
    tmp_path: Path, legacy: bool | None
) -> None:
    write(tmp_path, LLAMA)
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    config |= {} if legacy is None else {"legacy": legacy}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    for text in ["<s>the fox</s>the dog", "the</s> dog", "</s>", "a\n<unk>b", *STRANGE]:
        assert list(ours.to_tokens(text)) == oracle.encode(text), text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"add_bos_token": False}}, (9,)),
        ({"tokenizer_config": {"add_bos_token": None, "add_prefix_space": None}}, (1, 9)),
        ({"tokenizer_config": {"add_bos_token": True, "add_eos_token": True}}, (1, 9, 2)),
        ({"added_tokens": {"<pad>": 400}, "tokenizer_config": {"bos_token": "<pad>"}}, (400, 9)),
        ({"tokenizer_config": {"bos_token": {"content": "</s>"}}}, (2, 9)),
        ({"special_tokens_map": {"bos_token": "</s>"}}, (2, 9)),
    ],
    ids=["no bos", "null", "eos", "added", "config", "map"],
)
def test_tokens_around_a_text_are_those_of_the_files(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    oracle = write(tmp_path, LLAMA)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    ours = Tokenizer.from_directory(tmp_path)
    inner = tuple(oracle.encode("fox"))
    assert ours.to_tokens("fox") == tuple(
        part for one in expected for part in (inner if one == 9 else (one,))
    )


def test_roles_of_tokens_are_those_of_the_trainer(tmp_path: Path) -> None:
    write(tmp_path, GEMMA)
    ours = Tokenizer.from_directory(tmp_path)
    names = ["<pad>", "</s>", "<s>", "<unk>", "<start_of_turn>"]
    assert ours.special_tokens(names) == {"<pad>": 0, "</s>": 1, "<s>": 2, "<unk>": 3}
    tokens = ours.to_tokens("<start_of_turn>the", add_special_tokens=False)
    assert tokens[0] == 4
    assert ours.to_text(tokens) == "<start_of_turn>the"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xff\xff", "is no SentencePiece model"),
        (b"", "is no SentencePiece model: it has 0 pieces"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x04", "is a model of kind 4; only BPE and unigram"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x01", "without a piece for unknown"),
        (b"\x0a\x03\x0a\x01a\x0a\x03\x0a\x01a\x12\x02\x18\x02", "has a piece twice"),
    ],
    ids=["garbage", "empty", "characters", "unknown", "twice"],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/tokenizer.model.*{message}"):
        Tokenizer.from_directory(tmp_path)
