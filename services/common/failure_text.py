"""The text of a failure, which may quote untrusted input, such as a key in a file.

The input may have any length and any characters. The text goes through logs and messages of bounded
size, so the text is short and printable.
"""

MAX_FAILURE_LENGTH = 500
"""Largest number of characters of a failure's text."""


def failure_text(text: str) -> str:
    """Returns the beginning of `text`, with a question mark for each character that cannot be
    printed or encoded."""
    begin = text[:MAX_FAILURE_LENGTH]
    return "".join(one if one.isprintable() else "?" for one in begin)
