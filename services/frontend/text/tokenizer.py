"""Text to tokens, and tokens to text while they are still coming.

A token is not a piece of text: one character may need several tokens, and a token's spacing may
depend on the one before it. So text is always made from a window of tokens, and `IncrementalText`
delivers what no later token can change. What was delivered is never taken back.
"""

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Self

import tokenizers

from services.common import bounded_file
from services.common.gguf.header import is_gguf
from services.common.gguf.tokenizer import read_gguf_tokenizer
from services.frontend.text.longest_token import longest_token
from services.frontend.text.token_texts import TokenTexts

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The library knows no other way to say it. Else each text would run in a pool of the library's, of
# as many threads as the machine has processors, each of which keeps memory of its own.

MAX_FILE_BYTES = 256 << 20
"""Bytes of a `tokenizer.json` at most; those of the largest vocabularies have a fifth."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character that decoders write for bytes that are not (yet) a character."""

MAX_HELD = 3
"""Replacement characters at the end of a text that are held back at most: so many may still become
a character that lacks its last byte."""

CONTEXT_TOKENS = 6
"""Prompt tokens that are read before the first token, to know its spacing; one would do but for odd
bytes."""

MAX_WINDOW_TOKENS = 32
"""Tokens that are read again for each new one, at most; only output that is no valid text reaches
it."""


class TooManyTokens(ValueError):
    """A text has more tokens than are wanted; `n_tokens` is their number."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(f"{n_tokens} tokens")
        self.n_tokens = n_tokens


class Tokenizer:
    """The checkpoint's tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._longest_token = longest_token(tokenizer)
        self.token_texts = TokenTexts(tokenizer)
        """Texts of single tokens."""
        self._skips_special = True

    @cached_property
    def with_special_tokens(self) -> Self:
        """A tokenizer whose texts have special tokens as they are written in the vocabulary."""
        other = copy.copy(self)
        other._skips_special = False
        return other

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Reads `tokenizer.json`.

        Raises:
            FileNotFoundError: the directory has none.
            ValueError: it is broken.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {directory}")
        return cls._from_json(bounded_file.read_bytes(path, max_bytes=MAX_FILE_BYTES), path)

    @classmethod
    def from_model(cls, model: Path) -> Self:
        """Reads the tokenizer of a directory or of a GGUF file.

        Raises:
            OSError: there is none.
            ValueError: it is broken, or of a kind that is not known.
        """
        if is_gguf(model):
            return cls._from_json(read_gguf_tokenizer(model).encode(), model)
        return cls.from_directory(model)

    @classmethod
    def _from_json(cls, content: bytes, path: Path) -> Self:
        try:
            return cls(tokenizers.Tokenizer.from_buffer(content))
        except BaseException as error:
            # The library has no class of its own for what is wrong, and panics at some of it. A
            # panic is no Exception, so that nobody goes on in a broken state. There is none here,
            # since the tokenizer never came to be; and its class has no module to take it from.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ValueError(f"{path} is broken: {error}") from error
            raise

    def min_tokens(self, text: str) -> int:
        """Returns a number of tokens that the text has at least, by its length alone; 0 where its
        length says nothing."""
        return 0 if self._longest_token is None else -(-len(text) // self._longest_token)

    def to_tokens(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Returns the tokens of a text, with those that the checkpoint puts around it if wanted.

        Other threads run meanwhile: of the library's ways to encode, those for batches let them.
        They do not while numbers are made of the tokens, so that is done for `max_tokens` at most.

        Raises:
            TooManyTokens: there are more.
        """
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        n_tokens = len(encoding)
        if max_tokens is not None and n_tokens > max_tokens:
            del encoding  # else the error's traceback would keep it
            raise TooManyTokens(n_tokens)
        return tuple(encoding.ids)

    @cached_property
    def n_tokens_before(self) -> int:
        """The number of special tokens that the checkpoint puts in front of texts."""
        mask = self._tokenizer.encode("a").special_tokens_mask
        return next((place for place, is_special in enumerate(mask) if not is_special), 0)

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens unless they are wanted."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skips_special)

    def to_marked_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, with special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def special_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Returns those of the texts that are special tokens, with their numbers."""
        ids = {text: self._tokenizer.token_to_id(text) for text in texts}
        return {text: token for text, token in ids.items() if token in self._special_ids}

    def is_silent(self, token_id: int) -> bool:
        """Returns whether the token never shows in a text: it is special, and these are skipped, or
        it is not in the tokenizer."""
        is_skipped = self._skips_special and token_id in self._special_ids
        return is_skipped or self._tokenizer.id_to_token(token_id) is None

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns tokens as they are written in the vocabulary; empty texts for those that are not
        in the tokenizer."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Returns where in the text of tokens each of them begins, in characters. A character that
    several tokens share belongs to the last of them."""
    text = IncrementalText(tokenizer)
    offsets, n_characters = [], 0
    for token_id in token_ids:
        offsets.append(n_characters)
        n_characters += len(text.feed(token_id))
    return offsets


class IncrementalText:
    """The text of a growing list of tokens; each token costs the same, however many came before.

    `context` are tokens that come before the first one, where the text continues another: they
    decide whether it starts with a space. All pieces together are `to_text` of all tokens, with
    one exception: tokenizers that spell unknown characters byte by byte replace a whole run of
    bytes if any of it is invalid, even characters that were complete and are delivered; here these
    stay.

    `marks` are texts of special tokens that are wanted: the text begins anew after each.
    """

    __slots__ = (
        "_delivered",
        "_is_whole",
        "_marks",
        "_n_settled",
        "_tokenizer",
        "_whole_text",
        "_window",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks or {}
        self._window: list[int] = []
        self._delivered = ""
        """What the text of the window's tokens, the last ones, starts with."""
        if not tokenizer.token_texts.joins_bytes:  # else what comes before changes nothing
            self._window, self._delivered = _clean_tail(tokenizer, context)
        self._n_settled = len(self._window)  # tokens of the window whose text is all delivered
        self._is_whole = True  # no token of the window lacks a part of its text
        self._whole_text = tokenizer.token_texts.whole_text

    def feed(self, token_id: int) -> str:
        """Takes one more token and returns the text that is now final."""
        if self._is_whole:
            text = self._whole_text(token_id)
            if text is not None:
                self._window, self._n_settled, self._delivered = [token_id], 1, text
                return text
        if self._tokenizer.is_silent(token_id):
            return self._mark(token_id) if token_id in self._marks else ""
        self._window.append(token_id)
        text = self._tokenizer.to_text(self._window)
        if not text.startswith(self._delivered):
            text = self._without_context()
        n_held = len(text) - len(text.rstrip(REPLACEMENT))
        is_garbage = n_held > 0 and len(self._window) > MAX_WINDOW_TOKENS
        if is_garbage:
            n_held = min(n_held, MAX_HELD)
        piece = text[len(self._delivered) : len(text) - n_held]
        self._delivered += piece
        self._is_whole = n_held == 0
        if is_garbage:
            self._shorten(n_held)
        elif n_held == 0:
            self._settle()
        return piece

    def flush(self) -> str:
        """Returns the text that was held back; nothing is fed afterwards."""
        if self._is_whole:
            return ""
        return self._tokenizer.to_text(self._window)[len(self._delivered) :]

    def _mark(self, token_id: int) -> str:
        piece = self.flush() + self._marks[token_id]
        self._window.clear()
        self._n_settled = 0
        self._delivered = ""
        self._is_whole = True
        return piece

    def _without_context(self) -> str:
        """Returns the window's text without the context, since the new token has changed what that
        means."""
        del self._window[: self._n_settled]
        self._n_settled = 0
        self._delivered = ""
        return self._tokenizer.to_text(self._window)

    def _settle(self) -> None:
        """Notes that all text is delivered: the tokens since the last time become the context of
        the next."""
        del self._window[: self._n_settled]
        self._n_settled = len(self._window)
        self._delivered = self._tokenizer.to_text(self._window)

    def _shorten(self, n_held: int) -> None:
        """Drops tokens that are too old to be part of an unfinished character."""
        del self._window[: -MAX_WINDOW_TOKENS // 2]
        self._n_settled = 0
        text = self._tokenizer.to_text(self._window)
        self._delivered = text[: len(text) - n_held]


def _clean_tail(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[list[int], str]:
    """Returns the last few tokens and their text, if no character among them is cut; none if the
    last is unfinished."""
    last = reversed(token_ids[-4 * CONTEXT_TOKENS :])
    heard = (token_id for token_id in last if not tokenizer.is_silent(token_id))
    tail = [*islice(heard, CONTEXT_TOKENS + 3)][::-1]
    for n_tokens in range(CONTEXT_TOKENS, CONTEXT_TOKENS + 4):
        text = tokenizer.to_text(tail[-n_tokens:])
        if text.endswith(REPLACEMENT):
            break
        if not text.startswith(REPLACEMENT):
            return tail[-n_tokens:], text
    return [], ""
