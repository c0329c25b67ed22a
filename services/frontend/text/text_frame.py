"""The special tokens that a tokenizer puts around a text, or around and between two texts.

The tokenizers library can also cut texts off and put special tokens around what is left. But it
keeps what it cuts off, and makes a further encoding of each combination of the pieces: for two
texts of a few KB it makes millions. So this module reads the places of special tokens once, from
two short texts, and puts them around texts itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import tokenizers

from services.common import errors

SAMPLE = "a"
"""A text that has a token in every vocabulary."""


@dataclass(frozen=True, slots=True)
class _Special:
    """A special token that stands before, between or after texts."""

    token_id: int
    kind: int
    """Token type, by which the model tells the two texts of a pair apart."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place, among special tokens, of the tokens of one text."""

    index: int
    """Index of the text."""
    kind: int
    """Token type of the tokens of this text."""


@dataclass(frozen=True, slots=True)
class TextFrame:
    """Puts special tokens around one text, or around and between two texts."""

    _parts: tuple[_Special | _Place, ...]

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, *, n_texts: int, add_special_tokens: bool) -> Self:
        """Returns the places of the special tokens that the tokenizer puts around `n_texts` texts,
        one or two. Without `add_special_tokens`, there are no special tokens.

        Raises:
            RequestFailed: the tokenizer makes no token of the sample.
        """
        second = SAMPLE if n_texts > 1 else None
        framed = tokenizer.encode(SAMPLE, second, add_special_tokens=add_special_tokens)
        parts: list[_Special | _Place] = []
        columns = zip(framed.ids, framed.type_ids, framed.sequence_ids, strict=True)
        for token_id, kind, index in columns:
            if index is None:
                parts.append(_Special(token_id, kind))
            elif (place := _Place(index, kind)) not in parts:
                parts.append(place)
        if sum(isinstance(part, _Place) for part in parts) < n_texts:
            raise errors.RequestFailed(f"the model's tokenizer makes no token of {SAMPLE!r}")
        return cls(tuple(parts))

    @property
    def n_special(self) -> int:
        """Number of special tokens that are added."""
        return sum(isinstance(part, _Special) for part in self._parts)

    def around(self, texts: Sequence[Sequence[int]], *, type_stride: int = 0) -> tuple[int, ...]:
        """Returns the tokens of texts together with the special tokens. To the id of each token,
        `type_stride` times its token type is added."""
        token_ids: list[int] = []
        for part in self._parts:
            given = [part.token_id] if isinstance(part, _Special) else texts[part.index]
            token_ids += [one + type_stride * part.kind for one in given]
        return tuple(token_ids)
