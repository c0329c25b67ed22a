"""Environment variables that a machine may have, and that must not change the result of any
test."""

import os
from collections.abc import Mapping
from pathlib import Path

OUTSIDE: Mapping[str, str] = dict(os.environ)
"""The environment before tests change it, for commands that need the network."""

AUTHORITY = Path(__file__).with_name("authority.pem")
"""The only certificate authority that clients of tests trust by default. It has signed nothing. The
system has more than a hundred authorities. Each new client of `httpx` would read them all, which
takes about 30 ms of processor time."""

NOWHERE = "http://127.0.0.1:9"
"""A proxy address on which no process listens, so that a call through the proxy fails."""

PROXIES: Mapping[str, str] = {
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"), NOWHERE),
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOWHERE),
    "no_proxy": ".svc,10.0.0.0/8",
    "NO_PROXY": ".svc,10.0.0.0/8",
}
"""Environment variables of a machine that reaches the internet through a proxy."""
