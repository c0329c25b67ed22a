"""The field `encrypted_content` of reasoning.

Some clients send reasoning back only as `encrypted_content`, which they ask for by `include`. The
server stores nothing, so the field holds the reasoning itself, in Base64 after the prefix
`orcinus-reasoning:`. The reasoning is no secret: the same answer also has it as text.
"""

import base64
import binascii

_MARK = "orcinus-reasoning:"


def sealed(text: str) -> str:
    """Returns the value of `encrypted_content` that holds a text of reasoning."""
    return _MARK + base64.b64encode(text.encode()).decode()


def opened(value: str | None) -> str:
    """Returns the reasoning that a value of `encrypted_content` holds. If another server wrote the
    value, the reasoning cannot be read, and the result is empty."""
    if value is None or not value.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
