"""Explains why a source cannot be reached. The text names the proxy, and the fault of the server's
certificate if there is one."""

import os
import ssl
from collections.abc import Iterator

import httpx2

from services.common.url_credentials import without_credentials
from services.hub.authorities import REMEDY
from services.hub.proxies import proxy_for


def unreachable(endpoint: str, error: BaseException) -> str:
    """Returns an error message that names the server that cannot be reached, the proxy if there is
    one, and the reason. The server is the one to which the failed request of `error` was sent. It
    differs from `endpoint` after a redirect. If `error` has no request, the server is
    `endpoint`."""
    server = next(filter(None, map(_server, _causes(error))), without_credentials(endpoint))
    proxy = proxy_for(server, os.environ)
    way = "" if proxy is None else f" through the proxy {proxy}"
    return f"{server} cannot be reached{way}: {reason_of(error)}"


def _server(error: BaseException) -> str:
    """Returns the URL of the server to which the failed request was sent, or an empty text if
    `error` has no request."""
    if not isinstance(error, httpx2.RequestError):
        return ""
    try:
        url = error.request.url
    except RuntimeError:
        return ""
    return f"{url.scheme}://{url.netloc.decode()}"


def reason_of(error: BaseException) -> str:
    """Returns the reason why a server cannot be reached, as text. `error` is an error of httpx2."""
    causes = list(_causes(error))
    for cause in causes:
        match cause:
            case ssl.SSLCertVerificationError():
                is_unknown = "issuer" in cause.verify_message or "self" in cause.verify_message
                remedy = f"; {REMEDY}" if is_unknown else ""
                return f"its certificate is refused: {cause.verify_message}{remedy}"
            case httpx2.ProxyError():
                return f"the proxy answers {cause}"
            case httpx2.TimeoutException():
                return "it does not answer in time"
    for cause in reversed(causes):
        if isinstance(cause, ssl.SSLError):
            return f"no TLS: {cause.reason}"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return str(error) or type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, followed by its chain of causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
