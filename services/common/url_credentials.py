"""Finds and removes the user name and the password in a URL, which must not appear in messages."""

import re

_CREDENTIALS = re.compile(r"(?:[a-z0-9+.-]*://)?(.*@)", re.IGNORECASE | re.DOTALL)


def credentials_in(url: str) -> str:
    """Returns the user name and the password in a URL, including the sign `@` after them. The
    result is empty if the URL has none.

    Everything up to the last `@` counts as credentials. So no part of a password is shown, even if
    the URL is mistyped or the password has reserved characters.
    """
    found = _CREDENTIALS.match(url)
    return found[1] if found else ""


def without_credentials(url: str) -> str:
    """Returns a URL without its credentials. The URL may be mistyped."""
    return without(credentials_in(url), url)


def without(credentials: str, text: str) -> str:
    """Returns `text` without any occurrence of `credentials`."""
    return text.replace(credentials, "") if credentials else text
