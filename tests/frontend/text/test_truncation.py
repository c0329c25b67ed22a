"""Prompts that are cut off: as `tokenizers` itself does it, for texts and pairs."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.request.text_pair import TextPair
from services.frontend.request.truncation import CutTooShort
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend.checkpoints import word_piece

FILE = word_piece().to_str()
OURS = Tokenizer(tokenizers.Tokenizer.from_str(FILE))


def library(n_tokens: int) -> tokenizers.Tokenizer:
    """The tokenizer with the library's own truncation."""
    made = tokenizers.Tokenizer.from_str(FILE)
    made.no_padding()
    made.enable_truncation(n_tokens, strategy="longest_first")
    return made


@given(n_words=st.integers(1, 12), n_tokens=st.integers(3, 20))
def test_a_text_is_cut_as_the_library_cuts_it(n_words: int, n_tokens: int) -> None:
    text = "the quick brown fox jumps over the lazy dog"[: 4 * n_words]
    assert [*OURS.to_tokens(text, cut_to=n_tokens)] == library(n_tokens).encode(text).ids


@given(lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)), n_tokens=st.integers(5, 24))
def test_the_longer_text_of_a_pair_is_cut_first_as_the_library_does_it(
    lengths: tuple[int, int], n_tokens: int
) -> None:
    first, second = (" ".join(["the"] * lengths[0]), " ".join(["dog"] * lengths[1]))
    expected = library(n_tokens).encode(first, second)
    found = OURS.to_tokens(TextPair(first, second), cut_to=n_tokens, type_stride=1000)
    assert [token % 1000 for token in found] == expected.ids
    assert [token // 1000 for token in found] == expected.type_ids


def test_a_cut_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(CutTooShort, match="at least 3"):
        OURS.to_tokens("the fox", cut_to=2)
    with pytest.raises(CutTooShort, match="at least 5"):
        OURS.to_tokens(TextPair("the", "fox"), cut_to=4)
    assert len(OURS.to_tokens("the fox jumps", cut_to=1, add_special_tokens=False)) == 1


def test_what_is_cut_off_is_not_combined_by_the_library() -> None:
    """The library makes an encoding of each combination of what it has cut off from two texts:
    with these, more than memory holds."""
    pair = TextPair("the " * 20_000, "dog " * 20_000)
    assert len(OURS.to_tokens(pair, cut_to=5)) == 5


def test_without_special_tokens_both_texts_follow_each_other() -> None:
    the, dog = (OURS.to_tokens(text, add_special_tokens=False) for text in ("the", "dog"))
    pair = TextPair("the the the", "dog")
    assert OURS.to_tokens(pair, cut_to=3, add_special_tokens=False) == (*the, *the, *dog)
