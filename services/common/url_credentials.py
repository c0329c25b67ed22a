"""The user's name and the password in a URL, which no message may show."""

import re

_CREDENTIALS = re.compile(r"(?:[a-z0-9+.-]*://)?(.*@)", re.IGNORECASE | re.DOTALL)


def credentials_in(url: str) -> str:
    """Returns the credentials in a URL, including the sign `@` after them. The result is empty if
    there are none.

    Everything up to the last `@` counts as credentials. So no part of a password is shown, even if
    the URL is mistyped or the password has reserved characters.
    """
    found = _CREDENTIALS.match(url)
    return found[1] if found else ""


def without_credentials(url: str) -> str:
    """Returns a URL, which may be mistyped, without its credentials."""
    return without(credentials_in(url), url)


def without(credentials: str, text: str) -> str:
    """Returns a text from which credentials are removed wherever they occur."""
    return text.replace(credentials, "") if credentials else text
