"""Refuses a request on arrival if it could never run, because it would block all requests behind
it."""

from typing import Protocol

from services.common.errors import InvalidRequest
from services.scheduler.core.admission.pool_tokens import pool_tokens
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.request import Request


class PoolLimits(Protocol):
    """The limits of a request pool."""

    max_tokens: int
    """Largest number of tokens that the sequences of all requests may reach together."""


def check_feasible(request: Request, kv_manager: KVManager, pool: PoolLimits) -> None:
    """Checks that a request could run if there were no other requests.

    Raises:
        InvalidRequest: the request could never run. The error names the option that prevents this.
    """
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt", "must have at least one token")
    if not request.wants_vector and len(request.generated_token_ids) >= request.max_new_tokens:
        raise InvalidRequest("max_tokens", "leaves nothing to generate")
    if not kv_manager.fits_ever(request.max_sequence_len):
        raise InvalidRequest(
            "max_tokens",
            f"{request.n_prompt_tokens} prompt tokens and {request.max_new_tokens} new ones "
            f"need more than the {kv_manager.max_sequence_len} K/V slots that one request "
            "can have",
        )
    if pool_tokens(request) > pool.max_tokens:
        raise InvalidRequest(
            "max_tokens",
            f"{request.n_prompt_tokens} prompt tokens, {request.max_new_tokens} new ones and "
            f"{request.n_option_bytes} bytes of options exceed the {pool.max_tokens} that "
            "all requests may have together",
        )
