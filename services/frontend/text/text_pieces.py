"""Cuts a long text into pieces, to count its tokens in little memory."""

from collections.abc import Iterator

PIECE_CHARACTERS = 256 * 2**10
"""Largest number of characters in a piece, if a text is cut into pieces to count its tokens."""

CUT_CHARACTERS = 1024
"""Number of characters at the end of a piece in which a place to cut the text is looked for."""

CUT_TOKENS = 16
"""Largest number of tokens by which a cut between two pieces is expected to change the count. Most
cuts are in front of a space, and change nothing."""


def pieces_of(text: str, max_characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cuts a text into pieces of at most `max_characters` characters, and yields them. A piece
    begins with a space or a line end if there is one near the place of the cut."""
    start = 0
    while len(text) - start > max_characters:
        end = start + max_characters
        near = max(text.rfind(space, max(start, end - CUT_CHARACTERS), end + 1) for space in " \n")
        end = near if near > start else end
        yield text[start:end]
        start = end
    yield text[start:]
