"""The tokens of banned texts, as vLLM makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import InvalidRequest
from services.frontend.text.bad_words import bad_word_tokens
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints

TOKENIZER = Tokenizer.from_directory(Path("models/demo"))


def tokens(text: str) -> tuple[int, ...]:
    return TOKENIZER.to_tokens(text, add_special_tokens=False)


def test_a_word_is_banned_with_a_space_in_front_and_without() -> None:
    assert len(tokens("the")) == len(tokens(" the")) == 1
    assert bad_word_tokens(["the"], TOKENIZER) == (tokens("the"), tokens(" the"))


def test_spaces_in_front_do_not_count() -> None:
    assert bad_word_tokens(["   the"], TOKENIZER) == bad_word_tokens(["the"], TOKENIZER)


def test_equal_words_are_one() -> None:
    assert bad_word_tokens(["the", " the", "the"], TOKENIZER) == bad_word_tokens(["the"], TOKENIZER)


@pytest.mark.parametrize("word", ["the file does", "世界", "🐋x", "\x00", "e\u0301", "<|eos|>"])
def test_a_form_with_a_space_counts_if_it_is_as_long(word: str) -> None:
    plain, spaced = tokens(word), tokens(f" {word}")
    is_other = spaced[0] != plain[0] and len(spaced) == len(plain)
    assert bad_word_tokens([word], TOKENIZER) == ((plain, spaced) if is_other else (plain,))


def test_a_text_without_tokens_is_refused() -> None:
    tokenizer = Tokenizer(checkpoints.byte_level())
    with pytest.raises(InvalidRequest, match="bad_words"):
        bad_word_tokens([""], tokenizer)
