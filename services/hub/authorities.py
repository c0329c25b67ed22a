"""The certificate authorities that the environment names for connections to sources of checkpoints.

Different programs read different variables for this purpose, so several variables are supported.
All authorities that they name are trusted. If no variable is set, the authorities of the system are
trusted.
"""

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2

from services.common import bounded_file
from services.hub.source import SourceError

FILES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables that name a file with certificates in PEM, or a directory of such files."""
DIRECTORIES = "SSL_CERT_DIR"
"""Variable that names directories of files with certificates in PEM, separated by colons."""
REMEDY = f"name its authority in {FILES[0]}"

_MAX_BYTES = 1 << 24
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----\n?")


def named_authorities(environment: Mapping[str, str], *others: str) -> str:
    """Returns the certificates of all authorities that environment variables name, in PEM. The
    result is empty if no such variable is set. `others` are names of further variables of the same
    kind as `FILES`.

    Raises:
        SourceError: a variable names a file or directory that contains no certificates.
    """
    found: dict[str, None] = {}
    for variable, path in _named(environment, others):
        certificates = _certificates_in(variable, path)
        if not certificates:
            raise SourceError(f"{variable}: {path} has no certificate in PEM")
        found.update(dict.fromkeys(certificates))
    return "\n".join(found)


def context_with(authorities: str) -> ssl.SSLContext | bool:
    """Returns the argument `verify` for an httpx2 client that trusts `authorities`: an SSL context.
    If `authorities` is empty, returns True. Then httpx2 trusts the authorities of the system."""
    if not authorities:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authorities)
    return context


def context_beside_system(
    authorities: str, environment: Mapping[str, str]
) -> ssl.SSLContext | bool:
    """Returns the argument `verify` of an httpx2 client that trusts the same authorities as the
    storage library.

    The library trusts `authorities` and, in addition, the authorities of the system. The variables
    `SSL_CERT_FILE` and `SSL_CERT_DIR` replace the authorities of the system.
    """
    if not authorities or any(environment.get(name) for name in (FILES[0], DIRECTORIES)):
        return context_with(authorities)
    context = httpx2.create_ssl_context(trust_env=False)
    context.load_verify_locations(cadata=authorities)
    return context


def _named(environment: Mapping[str, str], others: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for variable in (*others, *FILES):
        if path := environment.get(variable):
            yield variable, Path(path)
    for path in environment.get(DIRECTORIES, "").split(os.pathsep):
        if path:
            yield DIRECTORIES, Path(path)


def _certificates_in(variable: str, path: Path) -> list[str]:
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        texts = [
            bounded_file.read_bytes(file, max_bytes=_MAX_BYTES)
            for file in files
            if file == path or file.is_file()
        ]
    except OSError as error:
        raise SourceError(f"{variable}: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise SourceError(f"{variable}: {error}") from error
    found = [block.decode("ascii", "replace") for text in texts for block in _blocks(text)]
    try:
        for block in found:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=block)
    except (ssl.SSLError, ValueError) as error:
        raise SourceError(f"{variable}: a certificate in {path} is malformed") from error
    return found


def _blocks(text: bytes) -> list[bytes]:
    return [block.strip() for block in _CERTIFICATE.findall(text)]
