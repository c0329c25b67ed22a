"""The reasons why clients are refused or cut off, for both protocols, and how often each has
occurred.

Code that enforces a limit counts here; the metrics read the counts.
"""

from collections import Counter
from enum import StrEnum


class Refusal(StrEnum):
    """A reason to refuse a client, or to end what the client has begun."""

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
    """Data of clients takes all the memory that it may: requests, and output that is not read."""
    CONNECTIONS = "connections"
    """There are too many connections, or too many calls on one of them."""
    HEAD_TOO_LARGE = "head_too_large"
    """A request line with its headers, or the metadata of a call, is too large."""
    HEAD_TIMEOUT = "head_timeout"
    """A request line with its headers, or a TLS handshake, did not arrive in time."""
    MALFORMED = "malformed"
    """The bytes are not HTTP, or break one of its rules."""
    BODY_TOO_LARGE = "body_too_large"
    """A body or message is too large, or has too many parts."""
    BODY_TIMEOUT = "body_timeout"
    """A body or message did not arrive in time."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """A text is too long, which was seen before it was made into tokens."""
    UNREAD = "unread"
    """A client did not read its answer in time, or left too much of it unread."""
    VIEWERS = "viewers"
    """Too many viewers watch the scheduler."""


class Refusals(Counter[Refusal]):
    """Number of refusals so far, by reason; every reason has a count from the start."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(Refusal, 0))
