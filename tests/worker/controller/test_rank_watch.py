"""Heartbeats of ranks and of their stage, and ranks that are lost."""

import asyncio

import pytest

from services.worker.controller.rank_watch import (
    CHECK_S,
    LOADING_SILENCE_LIMIT_S,
    RECENTLY_S,
    RankWatch,
)
from tests.limits import HANG_S


class World:
    """A watch over two ranks, and what it says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.watch = RankWatch(2, on_alive=lambda: self.said.append("alive"), on_lost=self.lost)

    def lost(self, reason: str, is_by_itself: bool) -> None:
        assert self.watch.failure.done(), "whoever hears of it finds it said"
        self.said.append(reason)

    def load(self, *tp_ranks: int) -> None:
        for tp_rank in tp_ranks:
            self.watch.note_loaded(tp_rank)

    def beat(self, *tp_ranks: int) -> None:
        for tp_rank in tp_ranks:
            self.watch.note_heartbeat(tp_rank)
        self.watch.check(silence_limit_s=LIMIT_S)


LIMIT_S = 4 * CHECK_S


async def test_a_stage_lives_as_long_as_all_its_ranks_do() -> None:
    it = World()
    it.beat()  # both are loading
    it.load(0, 1)
    it.beat(0)
    it.watch.beat()
    assert it.said == [], "nothing from one of them yet"
    it.beat(0, 1)
    it.watch.beat()
    for _ in range(4):
        assert not it.watch.failure.done()
        it.watch.beat()
        it.beat(1)
    reason = "rank 0 has given no sign of life for 1 s"
    assert it.said == [*["alive"] * 5, reason]
    assert it.watch.failure.result() == reason
    assert it.watch.n_heartbeats == 5


async def test_a_stage_sends_heartbeats_until_it_is_lost() -> None:
    it = World()
    it.load(0, 1)
    it.beat(0, 1)
    async with asyncio.timeout(HANG_S):
        await it.watch.watch(LIMIT_S)  # no rank sends anything from now on
    assert it.said == ["alive", "rank 0 has given no sign of life for 1 s"]


@pytest.mark.parametrize("begins", [False, True], ids=["never begins", "begins"])
async def test_a_rank_that_loads_may_be_silent_for_longer_but_not_for_ever(begins: bool) -> None:
    it = World()
    it.load(1)
    if begins:
        it.beat(0, 1)
    for _ in range(int(LOADING_SILENCE_LIMIT_S / CHECK_S)):
        assert not it.watch.failure.done()
        it.beat(1)
    it.beat(1)
    assert it.watch.failure.result() == "rank 0 has given no sign of life for 60 s"


async def test_a_stage_fails_once() -> None:
    it = World()
    it.watch.lose("rank 1: out of memory")
    it.watch.lose("rank 1 exited with status 1")
    assert it.said == ["rank 1: out of memory"]
    assert it.watch.failure.result() == "rank 1: out of memory"


async def test_a_rank_is_alive_for_a_second_after_each_heartbeat() -> None:
    it = World()
    assert it.watch.n_alive == 0
    it.beat(0)
    assert it.watch.n_alive == 1
    for _ in range(round(RECENTLY_S / CHECK_S)):
        assert it.watch.n_alive >= 1
        it.beat(1)
    assert it.watch.n_alive == 1
    it.watch.note_heartbeat(0)
    assert it.watch.n_alive == 2


async def test_the_watch_ends_when_a_rank_is_lost() -> None:
    it = World()
    it.watch.lose("rank 0 exited")
    await it.watch.watch(3)
