"""The user's name and the password in a URL, which no message may show."""

import re

_CREDENTIALS = re.compile(r"(?:[a-z0-9+.-]*://)?(.*@)", re.IGNORECASE | re.DOTALL)


def credentials_in(url: str) -> str:
    """Returns the credentials in a URL, with the sign `@` that ends them; empty if there are none.

    Everything up to the last `@` counts, so that nothing of a mistyped URL or of a password with
    reserved characters is shown.
    """
    found = _CREDENTIALS.match(url)
    return found[1] if found else ""


def without_credentials(url: str) -> str:
    """Returns a URL, which may be mistyped, without its credentials."""
    return without(credentials_in(url), url)


def without(credentials: str, text: str) -> str:
    """Returns a text without credentials, wherever they are in it."""
    return text.replace(credentials, "") if credentials else text
