"""Text comes out of tokens as early as it is final, and all of it comes out."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from services.common import errors
from services.frontend.text.tokenizer import (
    CUT_TOKENS,
    MAX_WINDOW_TOKENS,
    PIECE_CHARACTERS,
    IncrementalText,
    Tokenizer,
    pieces_of,
)
from tests.checkpoints import write_checkpoint
from tests.frontend import checkpoints
from tests.ggufs import vocabulary, write_gguf

BYTE_LEVEL = Tokenizer(checkpoints.byte_level())
SENTENCEPIECE = Tokenizer(checkpoints.sentencepiece_like())
METASPACE = Tokenizer(checkpoints.metaspace())

N_BYTE_LEVEL_TOKENS = 340
DEMO = Path("models/demo")

all_tokenizers = pytest.mark.parametrize(
    "tokenizer",
    [BYTE_LEVEL, SENTENCEPIECE, METASPACE],
    ids=["byte-level", "sentencepiece", "metaspace"],
)
odd_text = st.text(st.characters(exclude_categories=["Cs"])) | st.text("héllo 世🐋 ▁\ufffd\n")


def pieces(
    tokenizer: Tokenizer, token_ids: Iterable[int], *, context: Sequence[int] = ()
) -> list[str]:
    text = IncrementalText(tokenizer, context)
    return [*(text.feed(token_id) for token_id in token_ids), text.flush()]


class Counting(Tokenizer):
    """Counts the tokens that it turns into text."""

    n_tokens = 0

    def to_text(self, token_ids: Sequence[int]) -> str:
        self.n_tokens += len(token_ids)
        return super().to_text(token_ids)


@all_tokenizers
@given(text=odd_text)
def test_pieces_of_any_text_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.to_tokens(text)
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.to_text(token_ids)


@given(st.lists(st.integers(0, N_BYTE_LEVEL_TOKENS - 1)))
def test_pieces_of_any_byte_level_tokens_are_their_text(token_ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.to_text(token_ids)


@given(st.lists(st.integers(2, 257), min_size=2 * MAX_WINDOW_TOKENS, max_size=200))
def test_pieces_of_any_long_garbage_are_its_text(token_ids: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.to_text(token_ids)


@given(text=odd_text, context=odd_text)
def test_byte_level_text_does_not_depend_on_what_came_before(text: str, context: str) -> None:
    token_ids = BYTE_LEVEL.to_tokens(text, add_special_tokens=False)
    before = BYTE_LEVEL.to_tokens(context)
    assert "".join(pieces(BYTE_LEVEL, token_ids, context=before)) == text


@given(text=odd_text, context=st.text("helo wr", min_size=1))
def test_text_that_continues_another_keeps_its_first_space(text: str, context: str) -> None:
    tokens = SENTENCEPIECE.to_tokens(context)
    continued = SENTENCEPIECE.to_tokens(text)
    whole = SENTENCEPIECE.to_text([*tokens, *continued])
    got = "".join(pieces(SENTENCEPIECE, continued, context=tokens))
    assert SENTENCEPIECE.to_text(tokens) + got == whole


def test_half_a_character_is_held_back() -> None:
    token_ids = BYTE_LEVEL.to_tokens("🐋", add_special_tokens=False)
    assert len(token_ids) == 4
    assert pieces(BYTE_LEVEL, token_ids) == ["", "", "", "🐋", ""]


def test_half_a_character_at_the_end_is_delivered_as_a_replacement() -> None:
    token_ids = BYTE_LEVEL.to_tokens("a🐋", add_special_tokens=False)[:-1]
    assert pieces(BYTE_LEVEL, token_ids) == ["a", "", "", "", "\ufffd"]


def test_half_a_character_in_the_prompt_does_not_eat_the_answer() -> None:
    whale = BYTE_LEVEL.to_tokens("🐋", add_special_tokens=False)
    rest = BYTE_LEVEL.to_tokens("🐋b", add_special_tokens=False)[2:]
    assert "".join(pieces(BYTE_LEVEL, rest, context=whale[:2])) == BYTE_LEVEL.to_text(rest)


def test_bytes_of_a_prompt_do_not_spoil_the_answer() -> None:
    before = SENTENCEPIECE.to_tokens("世世世世世")
    token_ids = SENTENCEPIECE.to_tokens("世")[1:]
    assert "".join(pieces(SENTENCEPIECE, token_ids, context=before)) == "世"


def test_characters_spelled_in_bytes_come_one_by_one() -> None:
    token_ids = SENTENCEPIECE.to_tokens("世界")
    assert [piece for piece in pieces(SENTENCEPIECE, token_ids) if piece] == ["世", "界"]


def test_a_complete_character_stays_when_invalid_bytes_follow() -> None:
    invalid = SENTENCEPIECE.to_tokens("世")[1:2]
    token_ids = [*SENTENCEPIECE.to_tokens("世"), *invalid, *SENTENCEPIECE.to_tokens("hello")]
    assert "".join(pieces(SENTENCEPIECE, token_ids)) == "世\ufffd hello"


def test_special_and_unknown_tokens_have_no_text_and_do_not_break_spacing() -> None:
    hello = SENTENCEPIECE.to_tokens("hello")
    token_ids = [*hello, *[2] * 100, 99999, *hello]
    assert "".join(pieces(SENTENCEPIECE, token_ids)) == "hello hello"


@pytest.mark.parametrize(
    "text", ["hello world ", "世界", "🐋", "\ufffd"], ids=["words", "cjk", "emoji", "replacement"]
)
def test_a_token_costs_the_same_after_many(text: str) -> None:
    tokenizer = Counting(checkpoints.byte_level())
    token_ids = tokenizer.to_tokens(text, add_special_tokens=False) * 300
    incremental = IncrementalText(tokenizer)
    for token_id in token_ids:
        incremental.feed(token_id)
    assert tokenizer.n_tokens <= 2 * MAX_WINDOW_TOKENS * len(token_ids)


def test_garbage_does_not_pile_up() -> None:
    tokenizer = Counting(checkpoints.byte_level())
    incremental = IncrementalText(tokenizer)
    broken = tokenizer.to_tokens("🐋", add_special_tokens=False)[0]
    delivered = "".join(incremental.feed(broken) for _ in range(1000))
    assert len(delivered) >= 1000 - MAX_WINDOW_TOKENS
    assert delivered + incremental.flush() == "\ufffd" * 1000
    assert tokenizer.n_tokens <= 2 * MAX_WINDOW_TOKENS * 1000


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


@all_tokenizers
@given(text=odd_text | st.text("hello world\n", min_size=20), size=st.integers(1, 40))
def test_tokens_of_pieces_are_about_those_of_the_whole(
    tokenizer: Tokenizer, text: str, size: int
) -> None:
    parts = [*pieces_of(text, size)]
    assert "".join(parts) == text
    assert all(len(part) <= size for part in parts)
    n_tokens = sum(tokenizer.count_tokens(part, add_special_tokens=False) for part in parts)
    n_whole = tokenizer.count_tokens(text, add_special_tokens=False)
    assert abs(n_tokens - n_whole) <= CUT_TOKENS * len(parts)
    assert n_whole == len(tokenizer.to_tokens(text, add_special_tokens=False))


def test_words_are_not_cut() -> None:
    text = "hello world, " * 4
    assert [*pieces_of(text, 20)] == [
        "hello world, hello", " world, hello world,", " hello world, ",
    ]  # fmt: skip


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
