"""Clients' data takes no more memory together than it may."""

from threading import Thread

import pytest

from services.common.errors import PoolFull
from services.frontend.request.memory_budget import MemoryBudget, Share
from services.frontend.request.refusals import Refusal, Refusals


def test_shares_take_no_more_than_there_is_and_give_it_back() -> None:
    refusals = Refusals()
    budget = MemoryBudget(100, refusals=refusals)
    with budget.share(60) as first:
        with pytest.raises(PoolFull):
            budget.share(50)
        with budget.share(40) as second:
            with pytest.raises(PoolFull):
                second.grow(1)
            assert (second.n_bytes, budget.n_bytes) == (40, 100)
            first.shrink(10)
            second.grow(10)
    assert budget.n_bytes == 0
    assert refusals[Refusal.MEMORY] == 2


def test_a_share_that_is_alone_may_take_more() -> None:
    budget = MemoryBudget(100)
    share = budget.share(90)
    share.grow(90)
    with pytest.raises(PoolFull):
        budget.share(1)
    share.close()
    share.close()
    assert budget.n_bytes == 0


def test_a_share_of_a_block_that_is_over_takes_and_gives_back_nothing() -> None:
    budget = MemoryBudget(100)
    with budget.share(10) as share:
        part = share.split(4)
    share.grow(50)
    share.shrink(5)
    assert (share.n_bytes, budget.n_bytes) == (0, 4)
    part.close()
    assert budget.n_bytes == 0


def test_a_share_that_ends_while_a_thread_makes_it_grow_leaves_nothing_behind() -> None:
    class Watched(MemoryBudget):
        def has_room(self, n_bytes: int) -> bool:
            ending.start()
            ending.join(0.05)  # without the lock, the share would have ended now
            return super().has_room(n_bytes)

    budget = Watched(100)
    other, share = Share(budget), Share(budget)
    other.grow(10)
    ending = Thread(target=share.__exit__, args=(None, None, None))
    share.grow(20)
    ending.join()
    assert (share.n_bytes, budget.n_bytes) == (0, 10)
