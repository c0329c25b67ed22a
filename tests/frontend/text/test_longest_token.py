"""A text of so many characters has at least so many tokens, or nothing is said about it."""

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers

from services.frontend.text.longest_token import longest_token
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints


def normalised(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    tokenizer = checkpoints.byte_level()
    tokenizer.normalizer = normalizer
    return tokenizer


KNOWN = {
    "byte-level": checkpoints.byte_level(),
    "sentencepiece": checkpoints.sentencepiece_like(),
    "nfc": normalised(normalizers.NFC()),
    "nfkc-lower": normalised(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
}
WRITTEN = st.text(alphabet=st.sampled_from("hello wrd\u0301\u0308\u1100\u1161\u11a8ﬃé世🐋\n▁"))


@pytest.mark.parametrize("tokenizer", KNOWN.values(), ids=KNOWN.keys())
@given(text=WRITTEN | st.text())
def test_text_has_the_tokens_that_its_length_tells(
    tokenizer: tokenizers.Tokenizer, text: str
) -> None:
    checked = Tokenizer(tokenizer)
    assert checked.min_tokens(len(text)) <= len(checked.to_tokens(text, add_special_tokens=False))
    assert checked.min_tokens(10_000) > 50


def stripping() -> tokenizers.Tokenizer:
    return normalised(normalizers.Strip())


def shortening() -> tokenizers.Tokenizer:
    return normalised(normalizers.Replace("ll", "l"))


def replacing() -> tokenizers.Tokenizer:
    return normalised(normalizers.Replace(Regex(" +"), " "))


def dropping_spaces() -> tokenizers.Tokenizer:
    tokenizer = checkpoints.byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()]
    )
    return tokenizer


def removing() -> tokenizers.Tokenizer:
    tokenizer = checkpoints.byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    return tokenizer


def swallowing() -> tokenizers.Tokenizer:
    tokenizer = checkpoints.byte_level()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    return tokenizer


def unknown_alphabet() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))


def fused() -> tokenizers.Tokenizer:
    vocabulary = {"a": 0, "<unk>": 1}
    return tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True)
    )


def whole_words() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (stripping, " "),
        (shortening, "ll"),
        (replacing, " "),
        (dropping_spaces, " "),
        (removing, " "),
        (swallowing, " "),
        (unknown_alphabet, "b"),
        (fused, "b"),
        (whole_words, "b"),
    ],
)
def test_nothing_is_said_where_many_characters_may_vanish(
    make: Callable[[], tokenizers.Tokenizer], text: str
) -> None:
    assert longest_token(make()) is None
    assert Tokenizer(make()).min_tokens(len(text) * 10_000) == 0
