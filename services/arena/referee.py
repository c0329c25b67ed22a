"""A scheduler that checks every batch and every token, whichever policy selects.

The rules of a selection are in `checked.py` of the scheduling core. This module has the rules of a
run:

- At most `pipeline_depth` batches are in flight.
- A span begins where the last span of its request ended or, at an admission, after the tokens that
  the prefix cache has.
- No more blocks are in use than are reserved, and no more reserved than there are. Without a prefix
  cache, no block belongs to two requests.
- Each token of a request is returned once and in order, and nothing after its end.
- Every request ends (`check_over`).
"""

from time import thread_time_ns
from typing import Any

from services.arena.raised import described
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import MemoryView, Policy, PoolView, Selection
from services.scheduler.core.policies.checked import BrokenRule
from services.scheduler.core.policies.wrapped import WrappedPolicy
from services.scheduler.core.request import Request
from services.scheduler.core.whole_batches import WholeBatchScheduler


class Stopped(Exception):
    """A run was stopped because a rule was broken. The message names the policy, the batch and the
    rule."""


class RefereedScheduler(WholeBatchScheduler):
    """A scheduler that raises `Stopped` when a rule is broken."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Takes the arguments of `Scheduler`."""
        super().__init__(*arguments, **options)
        self.n_batches = 0
        """Number of batches that have been selected."""
        self.n_preemptions = 0
        """Number of preemptions that `take_preempted` has returned."""
        self._ends: dict[Request, int] = {}  # the end of the last span
        self._owners: dict[int, Request] = {}  # of each block, the request that got it last
        self._n_told: dict[Request, int] = {}  # tokens returned so far; -1 after the end

    def select(self) -> Batch | None:
        """Returns the next batch, as `Scheduler.select` does.

        Raises:
            Stopped: the batch breaks a rule, or the policy has raised an error.
        """
        place = f"batch {self.n_batches + 1}"
        try:
            batch = super().select()
            if batch is not None:
                self._check(batch)
                self.n_batches += 1
        except BrokenRule as broken:
            raise Stopped(f"{place}: {broken}") from broken
        except (Exception, SystemExit) as error:  # a policy may raise anything
            raise Stopped(
                f"{place}: policy {self.policy.name}: raises {described(error)}"
            ) from error
        return batch

    def take_preempted(self) -> list[Request]:
        """Returns the requests that were preempted since the last call, and counts them."""
        taken = super().take_preempted()
        self.n_preemptions += len(taken)
        return taken

    def check_over(self) -> None:
        """Checks, at the end of a run, that no request is left and no K/V memory is reserved.

        Raises:
            Stopped: a request has not ended, or K/V memory is still reserved.
        """
        left = [one.request_id for one in self.pool]
        after = f"after batch {self.n_batches}: policy {self.policy.name}"
        if left:
            raise Stopped(
                f"{after}: every request must end: {len(left)} never run, the first is request "
                f"{min(left, key=lambda one: (len(one), one))}"
            )
        if self.kv_manager.n_reserved_blocks:
            raise Stopped(f"{after}: {self.kv_manager.n_reserved_blocks} blocks stay reserved")

    def _withhold(self, updates: list[Update]) -> list[Update]:
        for update in updates:
            self._check_update(update)
        return super()._withhold(updates)

    def _check(self, batch: Batch) -> None:
        ends, owners = self._ends, self._owners
        name = f"policy {self.policy.name}"
        if self.n_in_flight > self.pipeline_depth:
            raise BrokenRule(f"{name}: {self.n_in_flight} batches are in flight")
        for span in batch.spans:
            request = span.request
            expected = request.n_cached_tokens if span.is_admission else ends.get(request)
            if span.start_position != expected:
                raise BrokenRule(
                    f"{name}: request {request.request_id} goes on at token "
                    f"{span.start_position}, and its last span ended at {expected}"
                )
            ends[request] = span.start_position + span.n_tokens - span.n_drafts
            if not self.kv_manager.has_prefix_cache:
                for block in span.new_block_ids:
                    _check_owner(owners.get(block), request, block, name)
                    owners[block] = request
        _check_accounts(self.kv_manager, name)

    def _check_update(self, update: Update) -> None:
        request = update.request
        n_before = request.n_prefill_tokens - request.n_prompt_tokens  # of another scheduler
        seen = self._n_told.get(request, n_before)
        place = f"policy {self.policy.name}: request {request.request_id}"
        if seen < 0:
            raise Stopped(f"batch {self.n_returned}: {place} has ended twice")
        if update.token_id is not None and update.n_generated != seen + 1:
            raise Stopped(
                f"batch {self.n_returned}: {place}: token {update.n_generated} follows token {seen}"
            )
        self._n_told[request] = -1 if update.finish_reason is not None else update.n_generated
        if update.finish_reason is not None:
            self._ends.pop(request, None)


class TimedPolicy(WrappedPolicy):
    """A policy that selects as another policy does, and measures the processor time of the
    selections."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.n_selections = 0
        """Number of selections that were measured."""
        self.select_ns = 0
        """Processor time of all selections together, in nanoseconds."""

    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the selection of the measured policy."""
        began_ns = thread_time_ns()
        chosen = self.policy.select(pool, kv_manager)
        self.select_ns += thread_time_ns() - began_ns
        self.n_selections += 1
        return chosen

    @property
    def mean_us(self) -> float:
        """Mean processor time of one selection, in microseconds."""
        return self.select_ns / 1e3 / max(1, self.n_selections)


def _check_owner(owner: Request | None, request: Request, block: int, name: str) -> None:
    if owner is None or owner is request or owner.reservation is None:
        return
    if block in owner.reservation.block_ids:
        raise BrokenRule(
            f"{name}: block {block} of request {owner.request_id} is given to request "
            f"{request.request_id}"
        )


def _check_accounts(kv_manager: KVManager, name: str) -> None:
    n_used, n_reserved = kv_manager.n_allocated_blocks, kv_manager.n_reserved_blocks
    if not n_used <= n_reserved <= kv_manager.n_blocks:
        raise BrokenRule(
            f"{name}: slots are overbooked: {n_used} blocks are used, {n_reserved} reserved, and "
            f"there are {kv_manager.n_blocks}"
        )
