"""Tokenizers that are made of a GGUF file's vocabulary."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from services.common.gguf.header import read_header
from services.common.gguf.tokenizer import read_gguf_tokenizer, special_tokens, tokenizer_json
from tests.checkpoints import write_checkpoint
from tests.ggufs import vocabulary, write_gguf

DEMO = Path("models/demo/tokenizer.json")
TEXTS = [
    "Hello world 12345, it's  fine\n\n  x",
    "DON'T I'LL we've",
    "日本語 čeština 🙂🙂 naïve",
    "def f(x):\n    return x**2  # 3.14\t\t\r\n",
    "  leading and trailing  ",
    "",
    "<|user|>hi<|assistant|>",
]

# SentencePiece: unknown, two controls, bytes, pieces with scores, and a token of the user's.
PIECES = ["▁", *"abcdehlorw", "▁h", "el", "lo", "he", "▁hel", "▁hello", "hel", "or", "▁w", "▁wor"]
SENTENCE_PIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES, "<mark>"],
    "token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4],
    "scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [0.0],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}
SPOKEN = ["hello world", "hello  lore<mark>", "wörld\n", "hell or high", "</s>", "x"]


def written(directory: Path, vocabulary: dict[str, Any]) -> Path:
    write_checkpoint(directory, vocab_size=len(vocabulary["tokens"]))
    return write_gguf(directory, directory / "m.gguf", tokenizer=vocabulary)


def demo(pre: str, **others: Any) -> dict[str, Any]:
    return vocabulary(json.loads(DEMO.read_text()), pre=pre) | others


def made(file: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(read_gguf_tokenizer(file))


def test_a_vocabulary_of_gpt_2_is_the_tokenizer_that_it_was_taken_from(tmp_path: Path) -> None:
    found = made(written(tmp_path, demo("gpt-2", add_bos_token=True, bos_token_id=0)))
    expected = tokenizers.Tokenizer.from_file(str(DEMO))
    for text in TEXTS:
        assert found.encode(text).ids == expected.encode(text).ids
        tokens = found.encode(text, add_special_tokens=False).ids
        assert tokens == expected.encode(text, add_special_tokens=False).ids
        assert found.decode(tokens, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_texts_are_cut_as_transformers_cuts_them(tmp_path: Path, pre: str) -> None:
    file = written(tmp_path, demo(pre, eos_token_id=1, bos_token_id=0, add_bos_token=False))
    found = made(file)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        expected = oracle(text, add_special_tokens=False).input_ids
        assert found.encode(text).ids == expected


def test_texts_of_qwen_are_composed(tmp_path: Path) -> None:
    found = made(written(tmp_path, demo("qwen2")))
    assert found.encode("e\u0301").ids == found.encode("\u00e9").ids


def test_digits_stay_together_as_the_kind_says(tmp_path: Path) -> None:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in demo("qwen2").items()}
    # Merges that join digits show what was cut before.
    metadata["tokenizer.ggml.tokens"] += ["12", "123", "1234"]
    metadata["tokenizer.ggml.token_type"] += [1, 1, 1]
    metadata["tokenizer.ggml.merges"] = ["1 2", "12 3", "123 4"]
    cut = {}
    for pre in ("gpt-2", "llama-bpe", "qwen2", "smollm"):
        content = tokenizer_json(metadata | {"tokenizer.ggml.pre": pre})
        cut[pre] = tokenizers.Tokenizer.from_str(content).encode("12341234").tokens
    assert cut["gpt-2"] == ["1234", "1234"]
    assert cut["llama-bpe"] == ["123", "4", "12", "34"]  # a word that is a token stays whole
    assert cut["qwen2"] == cut["smollm"] == list("12341234")


def test_sentence_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    file = written(tmp_path, SENTENCE_PIECE)
    found = made(file)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in SPOKEN:
        encoded = found.encode(text)
        assert encoded.ids == oracle(text).input_ids
        assert found.decode(encoded.ids) == oracle.decode(encoded.ids, skip_special_tokens=True)
    assert found.encode("hello world").tokens == ["<s>", "▁hello", "▁wor", "l", "d"]
    # As SentencePiece does, and unlike transformers: a space is put before each text and each part.
    assert found.encode(" lo<mark>lo").tokens == ["<s>", "▁", "▁", "lo", "<mark>", "▁", "lo"]


def test_sentence_pieces_without_a_space_in_front(tmp_path: Path) -> None:
    ends = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    found = made(written(tmp_path, SENTENCE_PIECE | ends))
    assert found.encode("hell or").tokens == ["hel", "l", "▁", "or", "</s>"]
    assert found.decode(found.encode(" hello").ids) == " hello"


def test_templates_know_special_tokens_by_name(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, SENTENCE_PIECE | {"padding_token_id": 9999}))
    assert special_tokens(header.metadata) == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model 't5' is not one of"),
        ({"pre": "viking"}, "tokenizer.ggml.pre 'viking' is not one of"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is no list"),
        ({"merges": ["ab"]}, "an entry that is no pair"),
        ({"token_type": [1]}, "token_type is not as long"),
        ({"model": "llama"}, "scores is not as long"),
        (
            {"model": "llama", "tokens": ["a" * 1025], "token_type": [1], "scores": [0.0]},
            "1025 characters",
        ),
    ],
)
def test_another_vocabulary_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    said = demo("gpt-2") | changes
    given = {key: value for key, value in said.items() if value is not None}
    file = written(tmp_path, {"tokens": [], **given}) if "tokens" in given else None
    metadata = {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    with pytest.raises(ValueError, match=named):
        tokenizer_json(metadata)
    if file is not None:
        with pytest.raises(ValueError, match=str(file)):
            read_gguf_tokenizer(file)
