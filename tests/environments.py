"""Environments that a machine may have, and that must change nothing."""

from collections.abc import Mapping

NOWHERE = "http://127.0.0.1:9"
"""A proxy address on which no process listens, so that a call through the proxy fails."""

PROXIES: Mapping[str, str] = {
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"), NOWHERE),
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOWHERE),
    "no_proxy": ".svc,10.0.0.0/8",
    "NO_PROXY": ".svc,10.0.0.0/8",
}
"""Variables of a network that reaches the outside by a proxy."""
