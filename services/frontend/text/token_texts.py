"""The text and the bytes of single tokens, for clients that want to see each token.

The text of a token is the text that the token adds in the middle of a text. For example, the text
of `▁Paris` is " Paris", although a text that begins with this token begins without the space. The
text of a special token is its name. If a token has only a part of a character, its text has U+FFFD
there, and its bytes are the bytes of that part.
"""

import functools
import json
import re

import tokenizers

MAX_CACHED = 2**14
"""Number of tokens whose texts are kept: some 2 MB."""

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Texts of the tokens of a tokenizer. Any thread may call the methods."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = _decoders(tokenizer)
        self._byte_of = _bytes_of_characters() if "ByteLevel" in decoders else {}
        self.joins_bytes = set(decoders) == {"ByteLevel"}
        """Whether the text of several tokens is the concatenation of the bytes of the tokens."""
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._anchor, self._anchor_text = _anchor(tokenizer)
        self.text = functools.lru_cache(MAX_CACHED)(self._text)
        """Returns the text of a token."""
        self.whole_text = functools.lru_cache(MAX_CACHED)(self._whole_text)
        """Returns the text that a token adds to any text that ends with a whole character; None if
        the added text depends on the text before, or if the token may be left out."""

    def to_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token. These are its text in UTF-8, or the bytes that the token
        stands for if they are not whole characters."""
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
    """Returns tokens with a plain text, and their text. A single token is decoded after these
    tokens. Both are empty if the tokenizer has no such tokens."""
    for text in ("a", "0", "."):
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(token_ids, skip_special_tokens=False)
        if decoded and REPLACEMENT not in decoded:
            return token_ids, decoded
    return [], ""


def _decoders(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Returns the types of the decoders that turn tokens into text, in order."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type", "") for part in parts]


def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte that each character of byte-level tokens stands for, with the mapping of
    GPT-2: a printable byte has its own character, and the other bytes have the characters from
    U+0100 on, in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printing)]
    found = {chr(byte): byte for byte in printing}
    return found | {chr(0x100 + place): byte for place, byte in enumerate(others)}
