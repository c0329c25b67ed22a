"""The log-probabilities and vectors of an iteration, which the core passes on unread."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class SpanLogprobs(NamedTuple):
    """The log-probabilities or the vector that a rank computed for a span, serialised for
    frontends."""

    sampled: bytes = b""
    """Log-probabilities of the sampled token; empty if the request asks for none."""
    prompt: tuple[tuple[int, bytes], ...] = ()
    """Log-probabilities of prompt tokens, in pieces: the position of the first token, and the
    serialised data. Empty if the request asks for none."""
    vector: bytes = b""
    """Vector of the request whose prompt ends with the span; empty if the request asks for none."""


NO_LOGPROBS: Mapping[int, SpanLogprobs] = MappingProxyType({})
