"""The rules that each selection of a policy must keep, and a wrapper that checks a policy by them.

Policies of installed packages are always checked, and `services/arena` checks all policies. After
each selection:

- A batch has at most `max_batch_size` requests and, where the policy has a limit, at most
  `max_tokens` tokens. A request is in it once, with at least one token, at most the tokens that it
  has left, and at most `max_span_tokens`; a request that runs whole is in it with all its tokens.
- Each request is one that the pool has offered in this selection. The order offers a request once,
  and none that has ended.
- A running request keeps its reservation. A waiting one has the reservation that the memory has
  made for it in this selection, and no reservation is made for a request that is not in the batch.
- The memory has reserved no more than there is, and exactly what these reservations take.
- With `keeps_order`, the admitted requests are the first waiting requests in the order.
- The policy has changed no request. Of the tokens, only their number and the last one are compared.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.order.order import BatchLimits
from services.scheduler.core.policies import MemoryView, PoolView, Selection
from services.scheduler.core.policies.wrapped import WrappedPolicy
from services.scheduler.core.request import Request, RequestState


class BrokenRule(Exception):
    """Raised when a policy has broken a rule. The message names the policy, the rule and the
    requests."""


class _Facts(NamedTuple):
    """The part of a request that no policy may change."""

    state: RequestState
    arrival: int
    place: int
    priority: int
    n_tokens: int
    n_prefill_tokens: int
    prompt: int
    """The `id()` of the sequence of the prompt's tokens. `account` is an `id()`, too."""
    account: int
    n_generated: int
    last_token_id: int | None
    stop_token_ids: frozenset[int]
    n_awaited: int
    n_in_flight: int
    n_preemptions: int
    max_new_tokens: int
    is_cancelled: bool
    reservation: Reservation | None

    @classmethod
    def of(cls, request: Request) -> "_Facts":
        return cls(
            request.state,
            request.arrival,
            request.place,
            request.priority,
            request.n_tokens,
            request.n_prefill_tokens,
            id(request.prompt_token_ids),
            id(request.account),
            len(request.generated_token_ids),
            request.generated_token_ids[-1] if request.generated_token_ids else None,
            request.stop_token_ids,
            request.n_awaited,
            request.n_in_flight,
            request.n_preemptions,
            request.max_new_tokens,
            request.is_cancelled,
            request.reservation,
        )


class _SeenPool:
    """A view of the pool that records the requests that it offers to the policy."""

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool
        self.offered: dict[Request, tuple[_Facts, int]] = {}
        """The offered requests in order, each with its facts and its number of scheduled tokens."""
        self.has_limits = False

    @property
    def n_waiting(self) -> int:
        return self._pool.n_waiting

    @property
    def n_running(self) -> int:
        return self._pool.n_running

    @property
    def n_waiting_answers(self) -> int:
        return self._pool.n_waiting_answers

    @property
    def has_both_kinds(self) -> bool:
        return self._pool.has_both_kinds

    def candidates(self) -> Iterator[Request]:
        before: set[Request] = set()
        for request in self._pool.candidates():
            if request in before or request.state is RequestState.FINISHED:
                raise BrokenRule(f"the order offers request {request.request_id} after its turn")
            before.add(request)
            self.offered.setdefault(request, (_Facts.of(request), request.n_scheduled))
            yield request

    def batch_limits(self, vector_tokens: int | None = None) -> BatchLimits | None:
        limits = self._pool.batch_limits(vector_tokens)
        self.has_limits = limits is not None
        return limits


class _SeenMemory:
    """A view of the K/V memory that records the reservations that it makes for the policy."""

    def __init__(self, memory: MemoryView) -> None:
        self._memory = memory
        self.n_free_before = memory.n_free_blocks
        self.made: dict[Request, Reservation] = {}
        self.begins: dict[Request, tuple[int, int]] = {}
        """For each request in `made`, its numbers of scheduled and of cached tokens just after the
        reservation was made."""
        self.n_taken = 0
        """Number of blocks that the reservations have taken."""

    @property
    def n_free_blocks(self) -> int:
        return self._memory.n_free_blocks

    def n_blocks_to_admit(self, request: Request) -> int:
        return self._memory.n_blocks_to_admit(request)

    def reserve(self, request: Request) -> Reservation | None:
        if request in self.made:
            raise BrokenRule(f"memory is reserved twice for request {request.request_id}")
        before = self._memory.n_free_blocks
        reservation = self._memory.reserve(request)
        if reservation is not None:
            self.made[request] = reservation
            self.begins[request] = (request.n_scheduled, request.n_cached_tokens)
            self.n_taken += before - self._memory.n_free_blocks
        return reservation


class CheckedPolicy(WrappedPolicy):
    """Wraps a policy, and checks that its selections keep the rules of this module."""

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the selection of the policy.

        Raises:
            BrokenRule: the selection breaks a rule.
        """
        seen, memory = _SeenPool(pool), _SeenMemory(kv_manager)
        try:
            chosen = self.policy.select(seen, memory)
            _check_types(chosen)
            self._check_batch(chosen)
            self._check_requests(chosen, seen)
            _check_memory(chosen, memory)
            if self.keeps_order and not seen.has_limits:
                _check_order(chosen, seen)
            _check_unchanged(seen, memory)
        except BrokenRule as broken:
            raise BrokenRule(f"policy {self.name}: {broken}") from broken
        return chosen

    def _check_batch(self, chosen: Sequence[Selection]) -> None:
        n_tokens = sum(one.n_tokens for one in chosen)
        if len(chosen) > self.max_batch_size:
            raise BrokenRule(
                f"{len(chosen)} requests are selected, and max_batch_size is {self.max_batch_size}"
            )
        if self.max_tokens is not None and n_tokens > self.max_tokens:
            raise BrokenRule(
                f"{n_tokens} tokens are selected, and its limit is {self.max_tokens} tokens"
            )

    def _check_requests(self, chosen: Sequence[Selection], seen: _SeenPool) -> None:
        found: set[Request] = set()
        for request, n_tokens, _ in chosen:
            name = f"request {request.request_id}"
            if request in found:
                raise BrokenRule(f"{name} is selected twice")
            found.add(request)
            if request not in seen.offered:
                raise BrokenRule(f"{name} is selected, and the pool did not offer it")
            if not 1 <= n_tokens <= request.n_unscheduled:
                raise BrokenRule(
                    f"{name} is selected with {n_tokens} tokens, and has {request.n_unscheduled}"
                )
            if request.runs_whole and n_tokens != request.n_unscheduled:
                raise BrokenRule(
                    f"{name} is selected with {n_tokens} of {request.n_unscheduled} tokens, and "
                    "runs whole"
                )
            if self.max_span_tokens is not None and n_tokens > self.max_span_tokens:
                raise BrokenRule(
                    f"{name} is selected with {n_tokens} tokens, and max_span_tokens is "
                    f"{self.max_span_tokens}"
                )


def _check_types(chosen: object) -> None:
    if not isinstance(chosen, list) or not all(isinstance(one, Selection) for one in chosen):
        raise BrokenRule("select must return a list of selections")
    for request, n_tokens, _ in chosen:
        if not isinstance(n_tokens, int):
            raise BrokenRule(
                f"request {request.request_id} is selected with {n_tokens!r} tokens, "
                "which is no whole number"
            )


def _check_memory(chosen: Sequence[Selection], memory: _SeenMemory) -> None:
    for request, _, reservation in chosen:
        name = f"request {request.request_id}"
        own = request.reservation
        if own is not None and reservation is not own:
            raise BrokenRule(f"{name} runs, and is selected with another reservation")
        if own is None and memory.made.get(request) is not reservation:
            raise BrokenRule(f"{name} waits, and its reservation was not made in this selection")
    left = memory.made.keys() - {one.request for one in chosen}
    if left:
        names = ", ".join(sorted(one.request_id for one in left))
        raise BrokenRule(f"memory is reserved and not used for request {names}")
    n_free = memory.n_free_blocks
    if n_free < 0 or memory.n_free_before - n_free != memory.n_taken:
        raise BrokenRule(
            f"slots are overbooked: {memory.n_free_before} blocks were free and {n_free} are, "
            f"after reservations of {memory.n_taken}"
        )


def _check_order(chosen: Sequence[Selection], seen: _SeenPool) -> None:
    admitted = {one.request for one in chosen if one.request.reservation is None}
    waiting = (one for one, (facts, _) in seen.offered.items() if facts.reservation is None)
    for request in islice(waiting, len(admitted)):
        if request not in admitted:
            raise BrokenRule(
                f"order: request {request.request_id} waits, and requests behind it are admitted"
            )


def _check_unchanged(seen: _SeenPool, memory: _SeenMemory) -> None:
    for request, (facts, n_scheduled) in seen.offered.items():
        now = _Facts.of(request)
        if now != facts:
            changed = [name for name in facts._fields if getattr(now, name) != getattr(facts, name)]
            raise BrokenRule(f"request {request.request_id} is changed: {', '.join(changed)}")
        begin = memory.begins.get(request, (n_scheduled, request.n_cached_tokens))
        if (request.n_scheduled, request.n_cached_tokens) != begin:
            raise BrokenRule(f"request {request.request_id} is changed: n_scheduled")
