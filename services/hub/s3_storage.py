"""Lists the objects in a bucket of S3-compatible storage, reads ranges of their bytes, and explains
errors.

The endpoint, the region and the credentials are read from the variables that AWS's programs use.
Credentials may be keys, a web identity (a role of a service account), a file of credentials, or
credentials that the machine provides. Connections are unencrypted only if the endpoint begins with
`http://`.
"""

import configparser
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2
from obstore import sign
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import S3Store

from services.common import bounded_file
from services.common.url_credentials import credentials_in, without, without_credentials
from services.hub.authorities import REMEDY, context_beside_system, named_authorities
from services.hub.proxies import Proxy, check_proxies, proxy_for
from services.hub.source import SourceError, SourceUnreachable
from services.hub.unreachable import reason_of

if TYPE_CHECKING:  # these names exist only for type checkers
    from obstore import GetOptions
    from obstore.store import ClientConfig, RetryConfig, S3Config

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
"""Seconds without a received byte after which a connection counts as lost."""
REQUEST_TIMEOUT_S = 900.0
"""Timeout in seconds for fetching one piece."""
MAX_RETRIES = 5
"""Largest number of retries of a request, or of the rest of its answer."""
RETRY_TIMEOUT_S = 180.0
"""Seconds from the first attempt of a request until it is no longer retried."""
CHUNK_BYTES = 1 << 20
_MAX_CREDENTIALS_BYTES = 1 << 20
_SIGNED_FOR = timedelta(minutes=5)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_AWS = "https://s3.amazonaws.com"
_AUTHORITIES = "AWS_CA_BUNDLE"
_REFUSED_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_CERTIFICATE_ERRORS = (
    ("UnknownIssuer", f"unknown authority; {REMEDY}"),
    ("Expired", "it has expired"),
    ("NotValidYet", "it is not valid yet"),
    ("NotValidForName", "it is for another name"),
)
"""For each reason for which the library refuses a certificate: a part of the reason's name, and an
explanation for people."""
_ROLE = "AWS_WEB_IDENTITY_TOKEN_FILE"
_KEY = "AWS_ACCESS_KEY_ID"
_FILE = "AWS_SHARED_CREDENTIALS_FILE"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as a listing of the bucket describes it."""

    key: str
    size: int
    etag: str
    """ETag of the object, without quotes. Empty if the object has none."""


class Bucket:
    """A bucket, which is accessed with the credentials in environment variables."""

    def __init__(self, name: str, *, environment: Mapping[str, str] = os.environ) -> None:
        """Prepares the connection. Raises SourceError if the environment variables are wrong."""
        named = [variable for variable in _ENDPOINTS if environment.get(variable)]
        endpoint = environment[named[0]] if named else ""
        if named and not _is_url(endpoint):
            raise SourceError(
                f"{named[0]}: {without_credentials(endpoint)!r} must begin with https:// or http://"
            )
        self.name = name
        self.endpoint = without_credentials(endpoint) or "AWS"
        self._credentials = credentials_in(endpoint)
        self._proxy = _proxy(endpoint or _AWS, environment)
        authorities = named_authorities(environment, _AUTHORITIES)
        self._verify = context_beside_system(authorities, environment)
        client: ClientConfig = {
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "read_timeout": timedelta(seconds=READ_TIMEOUT_S),
            "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
        }
        if authorities:
            client["root_certificate"] = authorities
        retry: RetryConfig = {
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
        }
        try:
            self._store = S3Store(
                name,
                config=_credentials(environment),
                client_options=client,
                retry_config=retry,
            )
        except (BaseError, ValueError) as error:
            raise SourceError(f"s3://{name}: {_first_line(error)}") from error

    def objects_in(self, prefix: str) -> list[StoredObject]:
        """Returns the objects directly below a prefix. Any other object that the storage lists is
        left out, such as an object whose key is the prefix itself. The prefix has no slash at its
        end, and is empty for the top of the bucket."""
        with self._explained(prefix):
            listed = self._store.list_with_delimiter(prefix or None)["objects"]
        begin = f"{prefix}/" if prefix else ""
        return [
            StoredObject(item["path"], item["size"], (item["e_tag"] or "").strip('"'))
            for item in listed
            if _is_name(item["path"].removeprefix(begin)) and item["path"].startswith(begin)
        ]

    def object_at(self, key: str) -> StoredObject:
        """Returns the object with the key `key`, with its size and ETag."""
        with self._explained(key):
            found = self._store.head(key)
        return StoredObject(key, found["size"], (found["e_tag"] or "").strip('"'))

    def read(self, of: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """Yields the bytes of an object from the offset `begin` up to, but not including, `end`.

        Raises:
            SourceError: the bytes cannot be read, or the object has changed.
        """
        with self._explained(of.key):
            options: GetOptions = {"range": (begin, end)}
            if of.etag:  # some storage has no ETags
                options["if_match"] = f'"{of.etag}"'
            got = self._store.get(of.key, options=options)
            if (got.meta["e_tag"] or "").strip('"') != of.etag or got.range != (begin, end):
                raise SourceError(f"s3://{self.name}/{of.key}: {_CHANGED}")
            n_left = end - begin
            for chunk in got.stream(min_chunk_size=CHUNK_BYTES):
                n_left -= len(chunk)
                if n_left < 0:
                    break
                yield chunk
        if n_left != 0:
            raise SourceError(f"s3://{self.name}/{of.key}: the answer has another size than asked")

    def is_encrypted_by_kms(self, key: str) -> bool:
        """Returns whether an object is encrypted with a key of KMS. The ETag of such an object is
        not a digest of its content."""
        with self._explained(key):
            url = sign(self._store, "HEAD", key, _SIGNED_FOR)
            answer = httpx2.head(url, timeout=READ_TIMEOUT_S, verify=self._verify)
            answer.raise_for_status()
        return answer.headers.get("x-amz-server-side-encryption", "").startswith("aws:kms")

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Converts errors of the library to SourceError, with a message that names the bucket and
        `key`."""
        try:
            yield
        except (BaseError, FileNotFoundError, httpx2.HTTPError) as error:
            place = f"s3://{self.name}/{key}".rstrip("/")
            kind, explanation = self._explanation(error)
            raise kind(f"{place}: {explanation}") from error

    def _explanation(self, error: Exception) -> tuple[type[SourceError], str]:
        line = without(self._credentials, _first_line(error))
        code = found[1] if (found := re.search(r"<Code>(\w+)</Code>", str(error))) else ""
        status = _status(error, line)
        match code, status:
            case _ if isinstance(error, PreconditionError) or status == "412":
                words = _CHANGED
            case _ if "performing POST" in line:
                words = f"AWS_ROLE_ARN: no credentials for the web identity in {_ROLE}: {line}"
            case _ if "/latest/" in line:
                words = (
                    f"no credentials: set {_KEY} and AWS_SECRET_ACCESS_KEY, or {_FILE}, or a role"
                )
            case "NoSuchBucket", _:
                words = f"there is no bucket {self.name!r} at {self.endpoint}"
            case _ if isinstance(error, FileNotFoundError):
                words = "there is no such object"
            case _ if "invalid path" in line:
                words = f"a key in it is no path: {line}"
            case _, "401" | "403":
                why = f" ({code})" if code else ""
                words = f"the credentials ({_KEY}, {_FILE} or AWS_ROLE_ARN) are refused{why}"
            case _ if "configured region" in line or status == "301":
                words = "the bucket is in another region: set AWS_REGION"
            case _, "":
                return SourceUnreachable, self._unreachable(error, line)
            case _:
                why = f" ({code})" if code else ""
                words = f"{self.endpoint} answers with HTTP status {status}{why}"
        return SourceError, words

    def _unreachable(self, error: Exception, line: str) -> str:
        """Returns an error message which says that the endpoint cannot be reached, through which
        proxy, and why."""
        way = "" if self._proxy is None else f" through the proxy {self._proxy}"
        if isinstance(error, httpx2.HTTPError):
            return f"{self.endpoint} cannot be reached{way}: {reason_of(error)}"
        found = _REFUSED_CERTIFICATE.search(str(error))
        if found is None:
            return f"{self.endpoint} cannot be reached{way}, or broke off: {line}"
        why = next((words for kind, words in _CERTIFICATE_ERRORS if kind in found[1]), found[1])
        return f"{self.endpoint} cannot be reached{way}: its certificate is refused: {why}"


def _is_url(endpoint: str) -> bool:
    try:
        url = urlsplit(endpoint)
    except ValueError:  # of brackets
        return False
    return url.scheme in ("https", "http") and bool(url.hostname)


def _proxy(url: str, environment: Mapping[str, str]) -> Proxy | None:
    """Returns the proxy through which storage is reached, or None if no proxy is used. Raises
    SourceError for a SOCKS proxy, which the library does not support."""
    check_proxies(environment)
    proxy = proxy_for(url, environment)
    if proxy is not None and proxy.is_socks:
        raise SourceError(
            f"{proxy.variable}: storage cannot be reached through a SOCKS proxy, {proxy}; name an "
            "HTTP proxy in HTTPS_PROXY, or the storage in NO_PROXY"
        )
    return proxy


_CHANGED = "changed while it was fetched; the next call fetches it as it is then"


def _is_name(name: str) -> bool:
    """Returns whether a name is valid as the name of a file in a directory, and is not a path."""
    return name not in ("", ".", "..") and not re.search(r"[/\\\x00-\x1f]", name)


def _status(error: Exception, line: str) -> str:
    """Returns the HTTP status that caused an error. The result is empty if no HTTP status caused
    it."""
    if isinstance(error, httpx2.HTTPStatusError):
        return str(error.response.status_code)
    found = re.search(r"status code: (\d{3})", line)
    return found[1] if found else ""


def _first_line(error: Exception) -> str:
    """Returns the message of an error, without the internal structures that the library adds."""
    return str(error).partition("\n")[0] or type(error).__name__


def _credentials(environment: Mapping[str, str]) -> "S3Config":
    """Returns the credentials in AWS's credentials file, which the library does not read itself.
    Returns an empty dictionary if there is no such file, or if environment variables hold
    credentials. The library reads these variables itself, and they take precedence.

    Raises:
        SourceError: the file has no complete credentials.
    """
    if environment.get(_KEY) or environment.get(_ROLE):
        return {}
    path = Path(environment.get(_FILE) or Path.home() / ".aws" / "credentials")
    if not path.is_file():
        return {}
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(
            bounded_file.read_bytes(path, max_bytes=_MAX_CREDENTIALS_BYTES).decode(), str(path)
        )
        values = parser[environment.get("AWS_PROFILE") or "default"]
        found: S3Config = {
            "access_key_id": values["aws_access_key_id"],
            "secret_access_key": values["aws_secret_access_key"],
        }
    except (OSError, ValueError, KeyError, configparser.Error) as error:
        raise SourceError(f"{_FILE}: {path} has no such credentials: {_kind(error)}") from error
    if "aws_session_token" in values:
        found["session_token"] = values["aws_session_token"]
    return found


def _kind(error: Exception) -> str:
    """Returns a description of an error in the credentials file. The description does not quote the
    file."""
    return f"no {error}" if isinstance(error, KeyError) else type(error).__name__
