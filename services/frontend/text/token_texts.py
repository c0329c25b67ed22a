"""The text and the bytes of single tokens, for clients that want to see each token.

The text of a token is the text that the token adds in the middle of a text. For example, the text
of `▁Paris` is " Paris", although a text that begins with this token begins without the space. The
text of a special token is its name. If a token has only some bytes of a character, its text has
U+FFFD in place of the character, and its bytes are these bytes.
"""

import functools
import json
import re

import tokenizers

MAX_CACHED = 2**14
"""Largest number of tokens whose texts are cached, which take about 2 MB."""

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Finds the texts and the bytes of single tokens of one tokenizer. Any thread may call the
    methods."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = _decoders(tokenizer)
        self._byte_of = _bytes_of_characters() if "ByteLevel" in decoders else {}
        self.joins_bytes = set(decoders) == {"ByteLevel"}
        """Whether the text of several tokens is simply the bytes of all tokens, joined."""
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._anchor, self._anchor_text = _anchor(tokenizer)
        self.text = functools.lru_cache(MAX_CACHED)(self._text)
        """Cached function that returns the text of a token."""
        self.whole_text = functools.lru_cache(MAX_CACHED)(self._whole_text)
        """Cached function that returns the text that a token adds to any text that ends with a
        whole character. It returns None if this text may depend on the text before, or if the token
        may have no text."""

    def to_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token: the token's text in UTF-8. If the token has only some bytes
        of a character, returns these bytes."""
        text = self.text(token_id)
        if REPLACEMENT in text:
            spelling = self._tokenizer.id_to_token(token_id) or ""
            if (match := _BYTE_TOKEN.fullmatch(spelling)) is not None:
                return bytes.fromhex(match.group(1))
            if self._byte_of and set(spelling) <= self._byte_of.keys():
                return bytes(map(self._byte_of.__getitem__, spelling))
        return text.encode()

    def _text(self, token_id: int) -> str:
        if self._tokenizer.id_to_token(token_id) is None:
            return ""
        text = self._decoded([*self._anchor, token_id])
        if text.startswith(self._anchor_text):
            return text[len(self._anchor_text) :]
        return self._decoded([token_id])

    def _whole_text(self, token_id: int) -> str | None:
        # Where bytes are concatenated, a whole character is not changed by its neighbours.
        if not self.joins_bytes or token_id in self._special_ids:
            return None
        text = self.text(token_id)
        return None if REPLACEMENT in text else text or None

    def _decoded(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _anchor(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], str]:
    """Returns the tokens of a short text, such as "a", and the text that they are decoded to. To
    find the text that a token has after other text, the token is decoded together with these
    tokens. Both results are empty if the tokenizer has no suitable tokens."""
    for text in ("a", "0", "."):
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
        if decoded and REPLACEMENT not in decoded:
            return token_ids, decoded
    return [], ""


def _decoders(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Returns the types of the decoders that turn tokens into text, in the order in which they are
    applied."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type", "") for part in parts]


def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte for which each character of a byte-level token stands, in the mapping of
    GPT-2. A printable byte is represented by its own character, and the other bytes by the
    characters from U+0100 on, in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printing)]
    found = {chr(byte): byte for byte in printing}
    return found | {chr(0x100 + place): byte for place, byte in enumerate(others)}
