"""A long text is cut where its tokens hardly change."""

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.text_pieces import CUT_TOKENS, pieces_of
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend.text.small_tokenizers import all_tokenizers, odd_text


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
