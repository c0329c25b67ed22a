"""The characters that stand for bytes in the vocabulary of byte-level BPE.

Bytes that are printable characters of Latin-1 stand for themselves. All other bytes, such as the
space, are written as the characters from U+0100 on, in ascending order.
"""

_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))
_REST = [byte for byte in range(256) if byte not in _PRINTABLE]
_TABLE = {byte: chr(0x100 + place) for place, byte in enumerate(_REST)}


def characters_of(token: bytes) -> str:
    """Returns the bytes of a token as the characters that stand for them in a vocabulary."""
    return token.decode("latin-1").translate(_TABLE)
