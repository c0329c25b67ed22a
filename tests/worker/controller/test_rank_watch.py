"""Heartbeats of ranks and of their stage, and ranks that are lost."""

import pytest

from services.worker.controller.rank_watch import (
    HEARTBEAT_S,
    LOADING_SILENCE_LIMIT_S,
    RankWatch,
)


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
        self.watch.check(silence_limit_s=3)


async def test_a_stage_lives_as_long_as_all_its_ranks_do() -> None:
    it = World()
    it.beat()  # both are loading
    it.load(0, 1)
    it.beat(0)
    it.beat(0, 1)
    it.beat(0)  # nothing from one of them yet
    it.beat(0)
    it.beat(0, 1)
    assert it.said == ["alive", "alive"]
    for _ in range(3):
        assert not it.watch.failure.done()
        it.beat(1)
    reason = "rank 0 has given no sign of life for 3 s"
    assert it.said == ["alive", "alive", reason]
    assert it.watch.failure.result() == reason
    assert it.watch.n_heartbeats == 2


@pytest.mark.parametrize("begins", [False, True], ids=["never begins", "begins"])
async def test_a_rank_that_loads_may_be_silent_for_longer_but_not_for_ever(begins: bool) -> None:
    it = World()
    it.load(1)
    if begins:
        it.beat(0, 1)
    for _ in range(int(LOADING_SILENCE_LIMIT_S / HEARTBEAT_S)):
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


async def test_a_rank_is_alive_from_its_first_heartbeat_until_it_misses_two_checks() -> None:
    it = World()
    assert it.watch.n_alive == 0
    it.beat(0)
    assert it.watch.n_alive == 1
    it.beat(1)
    assert it.watch.n_alive == 1
    it.watch.note_heartbeat(0)
    assert it.watch.n_alive == 2


async def test_the_watch_ends_when_a_rank_is_lost() -> None:
    it = World()
    it.watch.lose("rank 0 exited")
    await it.watch.watch(3)
