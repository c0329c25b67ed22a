"""Clients' data takes no more memory together than it may."""

import pytest

from services.common.errors import PoolFull
from services.frontend.request.memory_budget import MemoryBudget
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
