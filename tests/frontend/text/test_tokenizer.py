"""Broken tokenizers are refused by name, and texts become tokens."""

import json
from pathlib import Path

import pytest
import tokenizers

from services.common import errors
from services.frontend.text.text_pieces import PIECE_CHARACTERS
from services.frontend.text.tokenizer import Tokenizer
from tests.checkpoints import write_checkpoint
from tests.frontend.text.small_tokenizers import BYTE_LEVEL
from tests.ggufs import vocabulary, write_gguf

DEMO = Path("models/demo")


@pytest.mark.parametrize("content", ["{", "{}", ""], ids=["json", "empty", "nothing"])
def test_broken_tokenizer_is_a_value_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{path} is broken"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("vocab", "named"),
    [
        ({"a": 0, "b": 1, "c": 2**31}, "the token 'c' has the number 2147483648"),
        ({"a": 0, "b": 1, "c": 1}, r"the tokens \['b', 'c'\] have the same number 1"),
    ],
    ids=["huge", "twice"],
)
def test_numbers_that_no_vocabulary_has_are_refused(
    tmp_path: Path, vocab: dict[str, int], named: str
) -> None:
    file = {"model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=rf"tokenizer\.json is broken: {named}"):
        Tokenizer.from_directory(tmp_path)


def test_a_panic_of_the_library_is_a_value_error(tmp_path: Path) -> None:
    # Found by `tests.fuzz.coverage`: a normalizer whose map is missing.
    file = {"normalizer": {"type": "Precompiled"}, "model": {"type": "BPE", "vocab": {}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=r"tokenizer\.json is broken: .*precompiled_charsmap"):
        Tokenizer.from_directory(tmp_path)


def test_a_gguf_file_has_the_tokenizer_of_its_vocabulary(tmp_path: Path) -> None:
    said = json.loads((DEMO / "tokenizer.json").read_text())
    file = tmp_path / "m.gguf"
    write_gguf(write_checkpoint(tmp_path), file, tokenizer=vocabulary(said, pre="gpt-2"))
    found, expected = Tokenizer.from_model(file), Tokenizer.from_model(DEMO)
    text = "If the file does not exist, größer 🙂 <|eos|>"
    tokens = found.to_tokens(text)
    assert tokens == expected.to_tokens(text, add_special_tokens=False)
    assert found.to_text(tokens) == expected.to_text(tokens)
    assert found.special_tokens(["<|eos|>", "the"]) == {"<|eos|>": 1}


def test_a_vocabulary_that_contradicts_itself_is_a_value_error(tmp_path: Path) -> None:
    said = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": ["a c"]}
    file = write_gguf(write_checkpoint(tmp_path), tmp_path / "m.gguf", tokenizer=said)
    with pytest.raises(ValueError, match=f"{file} is broken"):
        Tokenizer.from_model(file)


def test_a_tokenizer_that_never_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.common.tokenizer_files.find.MAX_FILE_BYTES", 1000)
    (tmp_path / "tokenizer.json").write_text(" " * 1001)
    with pytest.raises(ValueError, match=r"tokenizer\.json has more than 1000 bytes"):
        Tokenizer.from_directory(tmp_path)


def test_special_tokens_go_around_a_text_only_if_wanted() -> None:
    bos = BYTE_LEVEL.to_tokens("")[0]
    assert BYTE_LEVEL.to_tokens("a")[0] == bos
    assert bos not in BYTE_LEVEL.to_tokens("a", add_special_tokens=False)


def test_counting_in_pieces_ends_where_it_is_told_to() -> None:
    text = "hello world, " * (3 * PIECE_CHARACTERS // 13)
    whole = BYTE_LEVEL.count_in_pieces(text)
    assert whole == BYTE_LEVEL.count_tokens(text, add_special_tokens=False)
    assert 10 < BYTE_LEVEL.count_in_pieces(text, up_to=10) <= whole // 2


def test_an_expression_with_too_many_ways_fails_the_request_alone() -> None:
    read = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "c": 1}, []))
    read.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(?:a|aa)+b"), "isolated")
    made = Tokenizer(read)
    hostile = "a" * 45 + "c"
    with pytest.raises(errors.RequestFailed, match=r"cannot divide the text: .*retry-limit"):
        made.to_tokens(hostile)
    with pytest.raises(errors.RequestFailed, match="cannot divide the text"):
        made.count_tokens(hostile)
    assert made.to_tokens("aac") == (0, 0, 1)
