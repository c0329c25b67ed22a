"""Text comes out of tokens as early as it is final, and all of it comes out."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.incremental_text import MAX_WINDOW_TOKENS, IncrementalText
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints
from tests.frontend.text.small_tokenizers import BYTE_LEVEL, SENTENCEPIECE, all_tokenizers, odd_text

N_BYTE_LEVEL_TOKENS = 340


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
