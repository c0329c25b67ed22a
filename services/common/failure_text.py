"""The text of a failure that names what somebody else wrote, such as a key in a file.

Such a name may have any length and any characters. The text goes through logs and messages of
bounded size, so it is short and printable.
"""

MAX_FAILURE_LENGTH = 500
"""Largest number of characters of a failure's text."""


def failure_text(text: str) -> str:
    """Returns the beginning of `text`, with a question mark for each character that cannot be
    printed or encoded."""
    begin = text[:MAX_FAILURE_LENGTH]
    return "".join(one if one.isprintable() else "?" for one in begin)
