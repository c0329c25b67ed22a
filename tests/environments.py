"""Environments that a machine may have, and that must change nothing."""

import os
from collections.abc import Mapping
from pathlib import Path

OUTSIDE: Mapping[str, str] = dict(os.environ)
"""The environment before tests change it, for a command that reaches the network."""

AUTHORITY = Path(__file__).with_name("authority.pem")
"""The only certificate authority that clients of tests trust by default. It has signed nothing.
The authorities of the system are a hundred and more, which each new client of `httpx` would read
again in some 30 ms of processor time."""

NOWHERE = "http://127.0.0.1:9"
"""A proxy address on which no process listens, so that a call through the proxy fails."""

PROXIES: Mapping[str, str] = {
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"), NOWHERE),
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOWHERE),
    "no_proxy": ".svc,10.0.0.0/8",
    "NO_PROXY": ".svc,10.0.0.0/8",
}
"""Variables of a network that reaches the outside by a proxy."""
