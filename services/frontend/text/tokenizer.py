"""Turns text into tokens, and tokens into text.

The text of tokens that are still coming is made by `IncrementalText`.
"""

import copy
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import tokenizers

from services.common import errors
from services.common.tokenizer_files.find import read_tokenizer, tokenizer_file
from services.frontend.request.text_pair import TextPair
from services.frontend.request.truncation import CutTooShort, kept_lengths
from services.frontend.text.longest_token import longest_token
from services.frontend.text.text_frame import TextFrame
from services.frontend.text.text_pieces import CUT_TOKENS, pieces_of
from services.frontend.text.token_texts import TokenTexts

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The library has no other setting for this. By default it encodes each text in a pool of as many
# threads as the machine has processors, each of which keeps memory of its own.

MAX_TOKEN_ID = 1 << 24
"""Largest token id that is accepted. The library takes memory for all ids below the largest one.
The largest vocabularies have a fiftieth of this number of tokens."""


class TooManyTokens(ValueError):
    """Raised if a text has more tokens than the caller allows. `n_tokens` is the number of tokens
    of the text, or the number that was counted before counting stopped."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(f"{n_tokens} tokens")
        self.n_tokens = n_tokens


class Tokenizer:
    """Turns text into tokens, and tokens into text, by the tokenizer of one checkpoint."""

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
        self._frames: dict[tuple[int, bool], TextFrame] = {}

    @cached_property
    def with_special_tokens(self) -> Self:
        """A copy of this tokenizer that turns special tokens into text, too, as the vocabulary
        spells them."""
        other = copy.copy(self)
        other._skips_special = False
        return other

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Reads the tokenizer in a directory: `tokenizer.json` or, without it, a tokenizer file of
        another format.

        Raises:
            FileNotFoundError: the directory has no such file.
            ValueError: the file is broken, or of an unknown kind.
        """
        path = tokenizer_file(directory)
        if not path.is_file():
            raise FileNotFoundError(f"no {path.name} in {directory}")
        return cls._from_json(read_tokenizer(path), path)

    @classmethod
    def from_model(cls, model: Path) -> Self:
        """Reads the tokenizer of a checkpoint's directory or of a GGUF file.

        Raises:
            OSError: there is no tokenizer.
            ValueError: the tokenizer is broken, or of an unknown kind.
        """
        if model.is_dir():
            return cls.from_directory(model)
        return cls._from_json(read_tokenizer(model), model)

    @classmethod
    def _from_json(cls, content: str, path: Path) -> Self:
        try:
            read = tokenizers.Tokenizer.from_str(content)
            _check_ids(read)
            return cls(read)
        except BaseException as error:
            # The library has no class of errors of its own, and panics at some files. A panic is
            # no Exception, so that programs do not go on in a broken state. Here no state is left,
            # since there is no tokenizer.
            if isinstance(error, Exception) or _is_panic(error):
                raise ValueError(f"{path} is broken: {error}") from error
            raise

    def min_tokens(self, n_characters: int) -> int:
        """Returns a lower bound on the number of tokens of a text of `n_characters` characters.
        Returns 0 if no bound is known."""
        return 0 if self._longest_token is None else -(-n_characters // self._longest_token)

    def to_tokens(
        self,
        text: str | TextPair,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        type_stride: int = 0,
        cut_to: int | None = None,
    ) -> tuple[int, ...]:
        """Returns the tokens of a text, or of two texts. With `add_special_tokens`, the special
        tokens that the checkpoint puts around texts are included. To the id of each token,
        `type_stride` times its token type is added; the type is 1 in the second text. With
        `cut_to`, the end of a longer text is cut off, and the result has at most `cut_to` tokens.

        The library's methods for batches are used, because only these release Python's global lock
        and let other threads run. While token ids are converted to Python numbers, the lock is
        held. So at most `max_tokens` ids are converted.

        Raises:
            TooManyTokens: the text has more tokens than `max_tokens`.
            RequestFailed: the library cannot divide the text.
            CutTooShort: `cut_to` is too small to keep a token of each text.
        """
        if cut_to is not None:
            frame = self._frame(1 + isinstance(text, TextPair), add_special_tokens)
            return frame.around(self._cut(text, cut_to, frame), type_stride=type_stride)
        given = (text.first, text.second) if isinstance(text, TextPair) else text
        (encoding,) = self._encodings([given], add_special_tokens=add_special_tokens)
        n_tokens = len(encoding)
        if max_tokens is not None and n_tokens > max_tokens:
            del encoding  # which the traceback of the error would keep in memory
            raise TooManyTokens(n_tokens)
        if not type_stride:
            return tuple(encoding.ids)
        both = zip(encoding.ids, encoding.type_ids, strict=True)
        return tuple([token_id + type_stride * kind for token_id, kind in both])

    def count_tokens(self, text: str | TextPair, *, add_special_tokens: bool = True) -> int:
        """Returns the number of tokens that `to_tokens` would return."""
        given = (text.first, text.second) if isinstance(text, TextPair) else text
        (encoding,) = self._encodings([given], add_special_tokens=add_special_tokens)
        return len(encoding)

    def _encodings(
        self, given: list[str] | list[str | tuple[str, str]], *, add_special_tokens: bool
    ) -> list[tokenizers.Encoding]:
        """Encodes texts, or pairs of texts, and returns the library's encodings. Raises
        RequestFailed if the library panics.

        The library panics if a regular expression of the checkpoint tries ten million ways to match
        the text, which takes a second. No state of the tokenizer is left broken.
        """
        try:
            return self._tokenizer.encode_batch_fast(given, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise errors.RequestFailed(
                f"the model's tokenizer cannot divide the text: {error}"
            ) from error

    def _cut(self, text: str | TextPair, n_tokens: int, frame: TextFrame) -> list[list[int]]:
        """Returns the first tokens of a text, or of each of two texts. With the special tokens of
        `frame` that are put around them, they are at most `n_tokens` tokens. Raises CutTooShort if
        a text would keep no token."""
        texts = [text.first, text.second] if isinstance(text, TextPair) else [text]
        n_least = frame.n_special + len(texts)
        if n_tokens < n_least:
            raise CutTooShort(f"must be at least {n_least}")
        encodings = self._encodings(texts, add_special_tokens=False)
        kept = kept_lengths([*map(len, encodings)], n_tokens - frame.n_special)
        return [one.ids[:n_kept] for one, n_kept in zip(encodings, kept, strict=True)]

    def _frame(self, n_texts: int, add_special_tokens: bool) -> TextFrame:
        key = n_texts, add_special_tokens
        if key not in self._frames:
            self._frames[key] = TextFrame.of(
                self._tokenizer, n_texts=n_texts, add_special_tokens=add_special_tokens
            )
        return self._frames[key]

    def count_in_pieces(self, text: str, *, up_to: int | None = None) -> int:
        """Returns the number of tokens of a text that is cut into pieces, without special tokens.
        The memory does not grow with the text. The number may differ from the number of tokens of
        the uncut text by up to `text_pieces.CUT_TOKENS` for each piece. If `up_to` is given,
        counting stops after the piece with which the number exceeds `up_to`."""
        n_tokens = 0
        for piece in pieces_of(text):
            n_tokens += self.count_tokens(piece, add_special_tokens=False)
            if up_to is not None and n_tokens > up_to:
                break
        return n_tokens

    def beginning(self, text: str, n_tokens: int) -> str:
        """Returns the beginning of a text: as many pieces as certainly have `n_tokens` tokens
        together. Returns the whole text if it has fewer. Counting takes the memory of one piece."""
        end, n_found = 0, 0
        for piece in pieces_of(text):
            end += len(piece)
            if end == len(text):
                break  # the last piece need not be counted
            n_found += self.count_tokens(piece, add_special_tokens=False) - CUT_TOKENS
            if n_found >= n_tokens:
                break
        return text[:end]

    @cached_property
    def n_tokens_before(self) -> int:
        """Number of special tokens that the checkpoint puts in front of texts."""
        mask = self._tokenizer.encode("a").special_tokens_mask
        return next((place for place, is_special in enumerate(mask) if not is_special), 0)

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens. Special tokens have no text, unless this tokenizer is a copy
        made by `with_special_tokens`."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skips_special)

    def to_marked_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, including special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def special_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Returns the token id of each text that is a special token, keyed by the text."""
        ids = {text: self._tokenizer.token_to_id(text) for text in texts}
        return {text: token for text, token in ids.items() if token in self._special_ids}

    def is_silent(self, token_id: int) -> bool:
        """Returns whether a token has no text, because it is a special token that is skipped or
        because the tokenizer does not know it."""
        is_skipped = self._skips_special and token_id in self._special_ids
        return is_skipped or self._tokenizer.id_to_token(token_id) is None

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the names that tokens have in the vocabulary. The name of a token that the
        tokenizer does not know is empty."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]


def _is_panic(error: BaseException) -> bool:
    """Returns whether an error is a panic of the tokenizers library. No module exports the class of
    these errors, so its name is compared."""
    return type(error).__name__ == "PanicException"


def _check_ids(tokenizer: tokenizers.Tokenizer) -> None:
    """Raises ValueError if a token has an id above `MAX_TOKEN_ID`, or if two tokens have the same
    id. In the second case the library would choose one of the two arbitrarily."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if len(set(ids.values())) < len(ids):
        (number, _), *_ = Counter(ids.values()).most_common(1)
        same = sorted(token for token, token_id in ids.items() if token_id == number)[:4]
        raise ValueError(f"the tokens {same} have the same number {number}")
    if ids and max(ids.values()) > MAX_TOKEN_ID:
        named = max(ids, key=ids.__getitem__)
        raise ValueError(f"the token {named[:80]!r} has the number {ids[named]}")
