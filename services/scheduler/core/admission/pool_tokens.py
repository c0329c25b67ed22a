"""The length, in tokens, with which a request counts against the limit of the pool's memory."""

from services.scheduler.core.request import Request

SMALL_OPTIONS_BYTES = 4096
"""Number of bytes of a request's options that do not count as tokens: the memory of each request
includes room for these bytes."""

OPTION_BYTES = 4
"""Number of bytes of options that count as one token."""


def pool_tokens(request: Request) -> int:
    """Returns the length, in tokens, with which a request counts against the limit of the pool.
    This is the largest length of its sequence. Long options, such as a large grammar, add tokens
    for their memory."""
    n_bytes = max(0, request.n_option_bytes - SMALL_OPTIONS_BYTES)
    return request.max_sequence_len + n_bytes // OPTION_BYTES
