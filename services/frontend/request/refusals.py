"""Why clients are refused, or cut off, and how often: the one list of reasons, for both protocols.

Whoever enforces a limit counts here; the metrics read it.
"""

from collections import Counter
from enum import StrEnum


class Refusal(StrEnum):
    """A reason to refuse a client, or to end what it has begun."""

    UNKNOWN_KEY = "unknown_key"
    """Nobody has the key that it shows, or it shows none."""
    KEY_RATE = "key_rate"
    """Its key allows no more requests, or tokens, this minute."""
    KEY_IN_FLIGHT = "key_in_flight"
    """Its key allows no more answers, or tokens, at once."""
    IN_FLIGHT = "in_flight"
    """There are too many answers in the making."""
    TOO_LATE = "too_late"
    """It would have its first token too late."""
    MEMORY = "memory"
    """What clients have sent, and not read, takes all the memory that it may."""
    CONNECTIONS = "connections"
    """There are too many connections, or calls on one of them."""
    HEAD_TOO_LARGE = "head_too_large"
    """A request line and its headers, or a call's metadata, are too large."""
    HEAD_TIMEOUT = "head_timeout"
    """They did not come in time."""
    MALFORMED = "malformed"
    """It is not HTTP, or not by its rules."""
    BODY_TOO_LARGE = "body_too_large"
    """A body or message is too large, or has too many parts."""
    BODY_TIMEOUT = "body_timeout"
    """It did not come in time."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """A text was refused before it was made into tokens."""
    UNREAD = "unread"
    """A client did not read its answer in time, or too much of it was unread."""
    VIEWERS = "viewers"
    """There are too many who watch the scheduler."""


class Refusals(Counter[Refusal]):
    """Number of clients refused so far, by reason; each reason is there from the start."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(Refusal, 0))
