"""The reasons why clients of either protocol (HTTP or gRPC) are refused or cut off, and a count for
each reason.

Code that enforces a limit increases the count of its reason in `Refusals`, and the metrics read the
counts.
"""

from collections import Counter
from enum import StrEnum


class Refusal(StrEnum):
    """A reason to refuse a client's request or connection, or to end it."""

    UNKNOWN_KEY = "unknown_key"
    """The client shows no API key, or an unknown one."""
    KEY_RATE = "key_rate"
    """The API key allows no more requests, or tokens, in this minute."""
    KEY_IN_FLIGHT = "key_in_flight"
    """The API key allows no more answers, or tokens, in flight."""
    IN_FLIGHT = "in_flight"
    """Too many answers are in flight."""
    TOO_LATE = "too_late"
    """The first token would come too late."""
    MEMORY = "memory"
    """The data of clients, such as requests and unread output, takes all the memory that it may
    take."""
    CONNECTIONS = "connections"
    """There are too many connections, or too many calls on one of them."""
    HEAD_TOO_LARGE = "head_too_large"
    """A request line with its headers, or the metadata of a call, is too large."""
    HEAD_TIMEOUT = "head_timeout"
    """A request line with its headers, or a TLS handshake, did not arrive in time."""
    MALFORMED = "malformed"
    """The received bytes are not HTTP, or break a rule of HTTP."""
    BODY_TOO_LARGE = "body_too_large"
    """A body or message is too large, or has too many parts."""
    BODY_TIMEOUT = "body_timeout"
    """A body or message did not arrive in time."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """A prompt has too many characters or tokens, or takes too long to render."""
    UNREAD = "unread"
    """A client did not read its answer in time, or left too much of it unread."""
    VIEWERS = "viewers"
    """Too many viewers watch the scheduler."""


class Refusals(Counter[Refusal]):
    """Number of refusals so far, keyed by reason. Every reason has a count of 0 at the start."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(Refusal, 0))
