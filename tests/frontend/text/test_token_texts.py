"""Texts, bytes and places of single tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.incremental_text import text_offsets
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints

BYTE_LEVEL = Tokenizer(checkpoints.byte_level())
SENTENCEPIECE = Tokenizer(checkpoints.sentencepiece_like())
METASPACE = Tokenizer(checkpoints.metaspace())

odd_text = st.text(st.characters(exclude_categories=["Cs"])) | st.text("héllo 世🐋 ▁\ufffd\n")


def cut_anywhere(tokenizer: Tokenizer, text: str, seed: int) -> list[int]:
    """Tokens of a text that is cut into pieces of any bytes, some of which are single ones."""
    single = {tokenizer.token_texts.to_bytes(token_id): token_id for token_id in range(2, 258)}
    draw = random.Random(seed)
    tokens: list[int] = []
    for character in text:
        if draw.random() < 0.5:
            tokens += (single[bytes([byte])] for byte in character.encode())
        else:
            tokens += tokenizer.to_tokens(character, add_special_tokens=False)
    return tokens


@given(text=odd_text, seed=st.integers(0, 1000))
def test_bytes_of_byte_level_tokens_are_those_of_the_text(text: str, seed: int) -> None:
    texts = BYTE_LEVEL.token_texts
    for tokens in (
        BYTE_LEVEL.to_tokens(text, add_special_tokens=False),
        cut_anywhere(BYTE_LEVEL, text, seed),
    ):
        in_bytes = [texts.to_bytes(token) for token in tokens]
        assert b"".join(in_bytes) == text.encode()
        assert [texts.text(token) for token in tokens] == [
            part.decode(errors="replace") for part in in_bytes
        ]


@given(text=odd_text)
def test_bytes_of_sentencepiece_tokens_are_those_of_the_text(text: str) -> None:
    texts = SENTENCEPIECE.token_texts
    tokens = SENTENCEPIECE.to_tokens(text, add_special_tokens=False)
    written = b"".join(texts.to_bytes(token) for token in tokens)
    expected = f" {text}".replace("▁", " ") if text else ""
    assert written == expected.encode()


@given(text=odd_text.filter(lambda text: "\ufffd" not in text), seed=st.integers(0, 1000))
def test_offsets_count_the_characters_before_each_token(text: str, seed: int) -> None:
    tokens = cut_anywhere(BYTE_LEVEL, text, seed)
    written, expected = b"", []
    for token in tokens:
        expected.append(len(written.decode(errors="ignore")))
        written += BYTE_LEVEL.token_texts.to_bytes(token)
    assert text_offsets(BYTE_LEVEL, tokens) == expected


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, METASPACE])
@given(text=odd_text)
def test_offsets_cut_any_text_into_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.to_tokens(text)
    offsets = text_offsets(tokenizer, tokens)
    whole = tokenizer.to_text(tokens)
    assert offsets == sorted(offsets)
    assert len(offsets) == len(tokens)
    assert all(0 <= offset <= len(whole) for offset in offsets)


def test_special_tokens_have_their_names_and_others_none() -> None:
    texts = BYTE_LEVEL.token_texts
    assert texts.text(1) == checkpoints.EOS
    assert texts.to_bytes(1) == checkpoints.EOS.encode()
    assert (texts.text(100_000), texts.to_bytes(100_000)) == ("", b"")


def test_words_have_the_space_that_they_have_within_a_text() -> None:
    for tokenizer in (SENTENCEPIECE, METASPACE):
        [token, *_] = tokenizer.to_tokens("hello", add_special_tokens=False)
        assert tokenizer.token_texts.text(token).startswith(" ")
