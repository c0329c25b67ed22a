"""The proxies that the environment names for connections to sources of checkpoints.

The libraries that fetch checkpoints read the same variables. This module refuses proxies that none
of these libraries supports. It also finds the proxy of a connection, so that error messages can
name the proxy.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2

from services.common.url_credentials import without_credentials
from services.hub.source import SourceError

_VARIABLES = {"http": "HTTP_PROXY", "https": "HTTPS_PROXY", "all": "ALL_PROXY"}
_EXCEPTIONS = "NO_PROXY"


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, and the environment variable that names it."""

    variable: str
    url: str

    @property
    def is_socks(self) -> bool:
        return self.url.startswith("socks")

    def __str__(self) -> str:
        """Returns the proxy's URL without credentials, and the variable that names it."""
        return f"{without_credentials(self.url)} ({self.variable})"


def check_proxies(environment: Mapping[str, str]) -> None:
    """Raises SourceError if a variable names a proxy that is not supported."""
    for scheme in _VARIABLES:
        proxy = _named(scheme, environment)
        if proxy is not None and not _is_understood(proxy):
            raise SourceError(
                f"{proxy.variable}: must be like http://HOST:PORT, https://HOST:PORT or "
                f"socks5://HOST:PORT (it is {without_credentials(proxy.url)!r})"
            )


def proxy_for(url: str, environment: Mapping[str, str]) -> Proxy | None:
    """Returns the proxy through which a URL is reached. Returns None if no proxy is used."""
    parts = urlsplit(url)
    own = _named(parts.scheme, environment) if parts.scheme in ("http", "https") else None
    proxy = own or _named("all", environment)
    excepted = _value(_EXCEPTIONS, environment)[1]
    return None if proxy is None or _is_excepted(parts.hostname or "", excepted) else proxy


def _named(scheme: str, environment: Mapping[str, str]) -> Proxy | None:
    variable, value = _value(_VARIABLES[scheme], environment)
    if not value:
        return None
    return Proxy(variable, value if "://" in value else f"http://{value}")


def _value(name: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns the name and the value of a variable. If the environment has the variable in lower
    case, that variable is used, and its name is returned in lower case. The value is empty if the
    variable is not set."""
    variable = name.lower() if name.lower() in environment else name
    return variable, environment.get(variable, "")


def _is_understood(proxy: Proxy) -> bool:
    try:
        return bool(httpx2.Proxy(proxy.url).url.host)
    except (ValueError, httpx2.InvalidURL):
        return False


def _is_excepted(host: str, excepted: str) -> bool:
    return any(_fits(host, entry.strip()) for entry in excepted.split(",") if entry.strip())


def _fits(host: str, entry: str) -> bool:
    """Returns whether an entry of `NO_PROXY` matches a host. An entry is a host's name, a suffix of
    such a name, or a network."""
    suffix = entry.lstrip("*").lstrip(".").lower()
    if entry == "*" or host == suffix or host.endswith(f".{suffix}"):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # one of them is a name
        return False
