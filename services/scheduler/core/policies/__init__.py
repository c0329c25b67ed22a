"""Policies: a policy chooses the requests of the next iteration, and the number of tokens of each
request.

A policy is a class in a file of its own with the methods of `Policy`, and a line in `registry.py`
through which the setting `policy` finds the class. A policy considers requests in the order of the
pool, and reserves K/V memory for the requests that it admits. The tokens that the prefix cache has
of an admitted request count as scheduled from then on. A policy changes no other state of requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.common.named_tuples import maker
from services.scheduler.core.admission.prompt_groups import NoPromptGroups, PromptGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool


class Selection(NamedTuple):
    """A chosen request, the number of its tokens to run, and its reservation."""

    request: Request
    n_tokens: int
    reservation: Reservation


selection_of = maker(Selection)
"""Makes a selection from a tuple of its fields."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The settings that policies may use."""

    max_batch_size: int
    """Largest number of requests in a batch."""
    max_batch_tokens: int | None = None
    """Largest number of tokens in a batch; None where there is no limit."""
    n_shares: int = 1
    """Number of batches in flight that share the running requests evenly."""


class Policy(Protocol):
    """Interface of a policy, which chooses the requests of each batch."""

    max_batch_size: int
    """Largest number of requests in a batch."""

    @property
    def name(self) -> str:
        """Name of the policy, in the settings and for observers."""
        ...

    @property
    def max_span_tokens(self) -> int | None:
        """Largest number of tokens of one request in a batch, or None where a prompt is always one
        span."""
        ...

    @property
    def prompt_groups(self) -> PromptGroups | NoPromptGroups:
        """The groups in which the policy begins prompts."""
        ...

    def select(self, pool: RequestPool, kv_manager: KVManager) -> list[Selection]:
        """Returns the requests of the next batch in order. Returns an empty list if no request can
        run."""
        ...

    def is_full(self, ready: Sequence[Request]) -> bool:
        """Returns whether the next batch has no room for another request, if all of the running
        requests `ready` are in that batch."""
        ...
