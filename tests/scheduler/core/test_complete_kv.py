"""An epoch that goes on with the keys and values of a lost one reads only what was written.

A model of the ranks' memory holds the scheduler to it. It writes a batch when the batch returns. At
a loss, each batch in flight has left nonsense in any of the slots that it was to write. The next
epoch goes on with the same memory, and looks whether every query finds all the keys that it sees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch import Batch
from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.memory.kv_groups import BlockGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation import Speculation
from tests.scheduler.core.memory.test_windows import (
    WINDOWS,
    GroupedMemory,
    TokenAt,
    WindowDriver,
    check_blocks,
    policy_of,
    use_of,
)
from tests.scheduler.core.workload import PLAIN_TOKEN, STOP_TOKEN, Arrival, arrivals, build

SCOPES = (b"", b"", b"ann", None)


class LossyDriver(WindowDriver):
    """An engine that is lost now and then, and whose ranks keep their memory."""

    new_core: Callable[[], Scheduler]

    def select(self) -> Batch | None:
        batch = self.scheduler.select()
        if batch is not None:
            self.in_flight.append(batch)
        return batch

    def return_oldest(self) -> None:
        self.memory.run(self.in_flight[0], self.token_at)
        super().return_oldest()

    def lose(self, data: st.DataObject) -> None:
        """Loses the epoch. The next one goes on with its keys and values."""
        for batch in self.in_flight:
            self.memory.tear(batch, lambda: data.draw(st.booleans()))
        self.in_flight.clear()
        lost, following = self.scheduler, self.new_core()
        self.updates += lost.suspend()[1]
        assert lost.kv_manager.n_reserved_blocks == lost.kv_manager.n_allocated_blocks == 0
        self.scheduler = following
        if following.kv_manager.can_take_over(lost.kv_manager):
            following.resume(lost)
        assert following.adopt() == []


Lossy = TypeVar("Lossy", bound=LossyDriver)


@dataclass(frozen=True)
class Machine:
    """The sizes of a pipeline."""

    windows: tuple[int | None, ...]
    max_batch_tokens: int | None
    pipeline_depth: int
    token_hand_off: bool
    block_size: int
    n_more_blocks: int
    share: float | None
    max_drafts: int


MACHINES = st.builds(
    Machine,
    windows=WINDOWS,
    max_batch_tokens=st.none() | st.integers(6, 30),
    pipeline_depth=st.integers(1, 4),
    token_hand_off=st.booleans(),
    block_size=st.sampled_from([1, 2, 4]),
    n_more_blocks=st.integers(0, 30),
    share=st.sampled_from([None, 0.0, 1.0]),
    max_drafts=st.sampled_from([0, 4]),
)


def driver_of(
    machine: Machine,
    requests: list[Arrival],
    data: st.DataObject,
    make: type[Lossy] = LossyDriver,  # type: ignore[assignment]
) -> Lossy:
    """Returns a driver of the machine. Its drafts are drawn."""
    tokens = st.lists(st.sampled_from([PLAIN_TOKEN, PLAIN_TOKEN, STOP_TOKEN, 5]), max_size=4)

    def propose(sequence: bytes, length: int) -> list[int]:
        return data.draw(tokens)[:length]

    max_batch_tokens, block_size = machine.max_batch_tokens, machine.block_size
    max_drafts = machine.max_drafts if max_batch_tokens is not None else 0
    groups = BlockGroups(machine.windows, max_batch_tokens, max_drafts=max_drafts)
    longest = max(one.max_tokens for one in requests)
    n_needed = groups.n_blocks(
        -(-longest // block_size), groups.n_at_once(longest), block_size=block_size
    )
    use = use_of(machine.share)
    n_shares = 1 if machine.token_hand_off else machine.pipeline_depth
    policy = policy_of(max_batch_tokens, n_shares=n_shares)
    pool = RequestPool(max_requests=1000)

    def new_core() -> Scheduler:
        return Scheduler(
            pool,
            KVManager(
                n_blocks=n_needed + machine.n_more_blocks,
                block_size=block_size,
                groups=groups,
                has_prefix_cache=True,
                expected_use=use,
            ),
            policy=policy,
            pipeline_depth=machine.pipeline_depth,
            token_hand_off=machine.token_hand_off,
            drafter=Drafter(max_drafts, max_batch_tokens or 0, propose) if max_drafts else None,
        )

    driver = make(new_core(), requests)
    driver.new_core = new_core
    driver.token_at = TokenAt(requests)
    driver.memory = GroupedMemory(groups, block_size=block_size)
    return driver


@given(requests=arrivals(with_cancellations=True, n_requests=12), data=st.data(), machine=MACHINES)
def test_the_next_epoch_reads_only_what_is_complete(
    requests: list[Arrival], data: st.DataObject, machine: Machine
) -> None:
    run_with_losses(driver_of(machine, requests, data), data, depth=machine.pipeline_depth)


def run_with_losses(driver: LossyDriver, data: st.DataObject, *, depth: int) -> None:
    """Runs all requests to their ends, with up to four losses."""
    n_losses = 0
    for _ in range(600):
        if driver.is_done:
            break
        driver.arrive()
        for index, request in driver.requests.items():
            request.speculation = request.speculation or Speculation(length=4)
            request.cache_scope = SCOPES[index % len(SCOPES)]
        if n_losses < 4 and data.draw(st.integers(0, 9)) == 9:
            n_losses += 1
            driver.lose(data)
            check_blocks(driver)
        while driver.select() is not None:
            check_blocks(driver)
        while driver.in_flight and (len(driver.in_flight) == depth or data.draw(st.booleans())):
            driver.return_oldest()
            check_blocks(driver)
    assert driver.is_done
    while driver.in_flight:
        driver.return_oldest()
    manager = driver.scheduler.kv_manager
    assert manager.n_reserved_blocks == manager.n_allocated_blocks == 0


def core(
    *, n_blocks: int = 40, has_prefix_cache: bool = True, max_rows: int | None = None
) -> Scheduler:
    return build(
        max_batch_size=4,
        n_blocks=n_blocks,
        block_size=4,
        pipeline_depth=2,
        has_prefix_cache=has_prefix_cache,
        max_rows=max_rows,
        policy=policy_of(8, n_shares=2),
    )


def going_on(lost: Scheduler) -> Scheduler:
    """Returns the core of the next epoch, which goes on with the memory of a lost one."""
    lost.suspend()
    following = core()
    following.pool = lost.pool
    following.resume(lost)
    following.adopt()
    return following


def request_of(n_prompt: int, *, name: str = "r", scope: bytes | None = b"") -> Request:
    prompt = [(7 * at + len(name)) % 50 + 10 for at in range(n_prompt)]
    return Request(RequestId(name), prompt, max_new_tokens=20, cache_scope=scope)


def iterate(scheduler: Scheduler) -> None:
    """Runs a batch whose requests get the token 5."""
    batch = scheduler.select()
    assert batch is not None
    scheduler.apply(batch.iteration, [5] * batch.n_sampled)


def start_of(scheduler: Scheduler) -> int:
    """Returns where the first span of the next batch begins."""
    batch = scheduler.select()
    assert batch is not None
    return batch.spans[0].start_position


@pytest.mark.parametrize("n_decodes", [1, 2, 5])
def test_a_decode_goes_on_with_its_next_token(n_decodes: int) -> None:
    scheduler = core()
    scheduler.submit(request_of(6))
    for _ in range(1 + n_decodes):
        iterate(scheduler)
    assert scheduler.select() is not None, "lost with the next decode in flight"
    n_complete = 6 + n_decodes
    # If the decode in flight was to fill a block, the whole block counts as incomplete.
    expected = n_complete - 3 if n_complete % 4 == 3 else n_complete
    assert start_of(going_on(scheduler)) == expected


def test_a_prompt_goes_on_after_the_chunks_that_returned() -> None:
    scheduler = core()
    scheduler.submit(request_of(30))
    iterate(scheduler)
    iterate(scheduler)
    assert scheduler.select() is not None, "a chunk is in flight"
    assert start_of(going_on(scheduler)) == 16


def test_requests_go_on_after_a_second_loss_at_once() -> None:
    scheduler = core()
    scheduler.submit(request_of(9))
    for _ in range(4):
        iterate(scheduler)
    assert start_of(going_on(going_on(scheduler))) == 11


def test_requests_that_were_released_as_late_leave_what_is_complete() -> None:
    scheduler = core()
    request = request_of(9)
    scheduler.submit(request)
    for _ in range(4):
        iterate(scheduler)
    assert scheduler.select() is not None, "this batch is late"
    scheduler.release_late()
    following = going_on(scheduler)
    assert request.reservation is None
    assert start_of(following) == 8, "the block that the batch was to fill is incomplete"


def test_a_waiting_request_still_finds_what_others_have_computed() -> None:
    scheduler = core()
    first = request_of(12)
    scheduler.submit(first)
    while len(scheduler.pool):
        iterate(scheduler)
    following = going_on(scheduler)
    following.submit(request_of(12))
    assert start_of(following) == 8


def test_a_request_that_shares_nothing_is_computed_again() -> None:
    scheduler = core()
    scheduler.submit(request_of(9, scope=None))
    for _ in range(4):
        iterate(scheduler)
    assert start_of(going_on(scheduler)) == 0


def test_broken_requests_leave_nothing() -> None:
    scheduler = core()
    broken = request_of(9)
    scheduler.submit(broken)
    for _ in range(4):
        iterate(scheduler)
    batch, after = scheduler.select(), request_of(9)
    assert batch is not None
    scheduler.apply(batch.iteration, [5], broken=[0])
    following = going_on(scheduler)
    following.submit(after)
    assert start_of(following) == 0


@pytest.mark.parametrize(
    "following",
    [core(n_blocks=39), core(has_prefix_cache=False)],
    ids=["another size", "no prefix cache"],
)
def test_memory_of_another_kind_is_not_taken_over(following: Scheduler) -> None:
    lost = core()
    lost.suspend()
    assert not following.kv_manager.can_take_over(lost.kv_manager)
    with pytest.raises(ValueError, match="of another kind"):
        following.resume(lost)


def test_memory_in_use_is_not_taken_over() -> None:
    lost = core()
    lost.submit(request_of(6))
    iterate(lost)
    with pytest.raises(ValueError, match="in use"):
        core().resume(lost)
