"""Policies: choose the requests of the next iteration, and the number of tokens of each.

A policy is a class in a file of its own with the methods below, and a line in `registry.py` by
which the setting `policy` finds it. It looks at requests in the order of the pool and reserves K/V
for those it admits; what the prefix cache has of their tokens counts as scheduled from then on. It
changes no other state of theirs.
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
    """A request that was chosen, the number of tokens to run, and its reservation."""

    request: Request
    n_tokens: int
    reservation: Reservation


selection_of = maker(Selection)
"""Makes a selection of its fields."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The settings that policies may heed."""

    max_batch_size: int
    """Requests in a batch at most."""
    max_batch_tokens: int | None = None
    """Tokens in a batch at most; None where that is not limited."""
    n_shares: int = 1
    """Batches in flight that share the requests which run evenly."""


class Policy(Protocol):
    """The choice of the next batch."""

    max_batch_size: int
    """Requests in a batch at most."""

    @property
    def name(self) -> str:
        """What it is called, in settings and to observers."""
        ...

    @property
    def max_span_tokens(self) -> int | None:
        """Tokens of a request in a batch at most; None where a prompt is one span."""
        ...

    @property
    def prompt_groups(self) -> PromptGroups | NoPromptGroups:
        """The groups in which it begins prompts."""
        ...

    def select(self, pool: RequestPool, kv_manager: KVManager) -> list[Selection]:
        """Returns the requests of the next batch in order; empty if none can run."""
        ...

    def is_full(self, ready: Sequence[Request]) -> bool:
        """Returns whether requests that run, which could all ride the next batch, leave no room in
        it for another."""
        ...
