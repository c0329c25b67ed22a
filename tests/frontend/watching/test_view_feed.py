"""Viewers and what they are told, on a simulated clock and from a scheduler that a test plays."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import pytest
from orcinus.v1 import watch_pb2

from services.common import errors
from services.common.watch_figures import MINUTE_S
from services.frontend.request.refusals import Refusal, Refusals
from services.frontend.watching.subscription import EventReceiver
from services.frontend.watching.view_feed import (
    LINGER_S,
    MAX_PIECE_BYTES,
    MAX_UNSENT_BYTES,
    STOPPING,
    Viewer,
    ViewFeed,
)
from tests.fake_watch import decision, epoch, iteration, mark
from tests.simulated_time import simulate

T = TypeVar("T")


class Played:
    """A subscription whose events a test tells itself."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        """For each subscription so far, whether it asked for decisions."""
        self.is_running = False

    async def run(self, watcher: EventReceiver, *, has_decisions: bool) -> NoReturn:
        self.asked.append(has_decisions)
        self.is_running = True
        try:
            while True:
                await asyncio.sleep(3600)
        finally:
            self.is_running = False


class Stage:
    """A feed with its subscription."""

    def __init__(self, *, max_viewers: int = 4) -> None:
        self.played = Played()
        self.refusals = Refusals()
        self.feed = ViewFeed(self.played, max_viewers=max_viewers, refusals=self.refusals)

    def tell(self, *events: watch_pb2.WatchEvent) -> None:
        self.feed.received(events)


def on_stage(play: Callable[[Stage], Coroutine[Any, Any, T]], **settings: int) -> T:
    """Plays a test with a feed that runs."""

    async def main() -> T:
        stage = Stage(**settings)
        running = asyncio.ensure_future(stage.feed.run())
        try:
            await settle()
            return await play(stage)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return simulate(main())


async def settle() -> None:
    """Lets everybody do what there is to do now."""
    await asyncio.sleep(0.01)


async def told(viewer: Viewer) -> list[dict[str, Any]]:
    """All that waits for a viewer."""
    found: list[dict[str, Any]] = []
    while True:
        try:
            async with asyncio.timeout(0.01):
                found += map(json.loads, await viewer.next())
        except TimeoutError:
            return found


def types(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def test_the_subscription_is_there_while_there_are_viewers_and_a_little_longer() -> None:
    async def play(stage: Stage) -> None:
        assert not stage.played.asked
        for _ in range(2):  # a viewer that comes back soon finds it there
            with stage.feed.viewer():
                await settle()
                assert stage.played.is_running
            await asyncio.sleep(0.9 * LINGER_S)
            assert stage.played.is_running
        assert stage.played.asked == [False]
        await asyncio.sleep(0.2 * LINGER_S)
        assert not stage.played.is_running
        with stage.feed.viewer() as viewer:
            await settle()
            assert stage.played.asked == [False, False]
            assert await told(viewer) == []

    on_stage(play)


def test_who_comes_later_is_told_what_there_is_and_then_the_same_as_all() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as first:
            stage.feed.opened()
            stage.tell(epoch(1), iteration(1, 7))
            with stage.feed.viewer() as second:
                stage.tell(iteration(2, 7))
                seen = await told(second)
                assert types(seen) == ["here", "epoch", "iteration", "iteration"]
                assert seen[1:] == (await told(first))[1:]
            assert stage.feed.n_viewers == 1

    on_stage(play)


def test_an_event_is_written_down_once_for_all_viewers() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as a, stage.feed.viewer() as b:
            stage.feed.opened()
            stage.tell(epoch(1))
            (_, of_a), (_, of_b) = await a.next(), await b.next()
            assert of_a is of_b

    on_stage(play)


def test_the_first_figures_are_of_the_time_since_the_first_event() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as viewer:
            await settle()
            stage.feed.opened()
            await asyncio.sleep(3)
            stage.tell(epoch(1), iteration(1, 7))
            await told(viewer)
            await asyncio.sleep(2)
            figures = [event for event in await told(viewer) if event["type"] == "figures"]
            assert figures[0]["minute"]["tokens_per_s"] == 1

    on_stage(play)


def test_figures_are_told_once_a_second_until_the_pipeline_rests() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as viewer:
            stage.feed.opened()
            stage.tell(epoch(1), iteration(1, 7))
            await told(viewer)
            await asyncio.sleep(2 * MINUTE_S)
            figures = await told(viewer)
            assert {event["type"] for event in figures} == {"figures"}
            times = [event["t"] - figures[0]["t"] for event in figures]
            assert times == list(range(MINUTE_S + 1))
            assert figures[0]["recent"]["tokens_per_s"] == 1
            assert figures[-1]["minute"]["tokens_per_s"] == 0
            with stage.feed.viewer() as late:
                assert (await told(late))[-len(figures) :] == figures

    on_stage(play)


def test_viewers_are_told_once_that_the_scheduler_is_away_and_once_that_it_is_back() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as viewer:
            stage.feed.opened()
            stage.tell(epoch(1), mark("of the first"))
            await told(viewer)
            for _ in range(3):
                stage.feed.lost("gone")
            away = await told(viewer)
            assert [(event["type"], event["text"]) for event in away] == [("away", "gone")]
            with stage.feed.viewer() as late:
                assert types(await told(late)) == ["away"]
                stage.feed.opened()
                stage.tell(epoch(2))
                assert types(await told(late)) == types(await told(viewer)) == ["here", "epoch"]
            with stage.feed.viewer() as later:  # what was before belongs to another scheduler
                assert types(await told(later)) == ["here", "epoch"]

    on_stage(play)


def test_a_slow_viewer_skips_to_what_holds_when_it_reads_again_and_takes_no_more_memory() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as slow, stage.feed.viewer() as quick:
            stage.feed.opened()
            stage.tell(epoch(1))
            n_bytes = n_events = 0
            while n_bytes <= 3 * MAX_UNSENT_BYTES:
                n_events += 1
                stage.tell(iteration(n_events, *range(1000)))
                n_bytes += sum(len(data) for data in await quick.next())
                assert sum(map(len, slow._queue)) <= MAX_UNSENT_BYTES + 100
            assert not slow._queue
            seen = await told(slow)
            assert types(seen[:2]) == ["gap", "epoch"]
            assert seen[-1]["iteration"] == n_events
            stage.tell(iteration(n_events + 1, 1))
            assert (await told(slow))[0]["iteration"] == n_events + 1
            assert "gap" not in types(await told(quick))

    on_stage(play)


@pytest.mark.parametrize(
    ("then", "expected"),
    [("lost", ["gap", "away"]), ("lost and back", ["gap", "epoch"])],
)
def test_a_slow_viewer_is_told_of_the_scheduler_that_is_there_when_it_reads(
    then: str, expected: list[str]
) -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as slow:
            stage.feed.opened()
            stage.tell(epoch(1), mark("x" * MAX_UNSENT_BYTES))
            stage.feed.lost("gone")
            if "back" in then:
                stage.feed.opened()
                stage.tell(epoch(2))
            assert types(await told(slow)) == expected

    on_stage(play)


def test_news_come_in_pieces_of_a_bounded_size() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as viewer:
            stage.feed.opened()
            stage.tell(*(mark("x" * 1000) for _ in range(200)), mark("x" * 2 * MAX_PIECE_BYTES))
            n_events = 0
            while n_events < 202:
                piece = await viewer.next()
                n_events += len(piece)
                assert len(piece) == 1 or sum(map(len, piece)) <= MAX_PIECE_BYTES

    on_stage(play)


def test_decisions_are_asked_for_while_a_viewer_wants_them_and_told_to_no_other() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as plain:
            await settle()
            stage.feed.opened()
            stage.tell(epoch(1))
            assert types(await told(plain)) == ["here", "epoch"]
            with stage.feed.viewer(wants_decisions=True) as recorder:
                stage.tell(iteration(1, 7))  # of the watch that is about to end
                await settle()
                assert stage.played.asked == [False, True]
                stage.feed.opened()
                stage.tell(epoch(1), decision("{}"), iteration(2, 7))
                assert types(await told(recorder)) == ["here", "epoch", "decision", "iteration"]
                assert types(await told(plain)) == ["iteration", "gap", "epoch", "iteration"]
                with stage.feed.viewer(wants_decisions=True) as late:  # no gap for the recorder
                    stage.tell(decision("{}"))
                    seen = ["here", "epoch", "iteration", "decision"]
                    assert types(await told(late)) == seen
                    assert types(await told(recorder)) == ["decision"]
                await settle()
                assert stage.played.asked == [False, True]
            await settle()
            assert stage.played.asked == [False, True, False]

    on_stage(play)


def test_there_are_so_many_viewers_at_most() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer():
            with (
                pytest.raises(errors.PoolFull, match="too many are watching"),
                stage.feed.viewer(),
            ):
                pass
            assert stage.refusals[Refusal.VIEWERS] == 1
        with stage.feed.viewer():
            assert stage.feed.n_viewers == 1

    on_stage(play, max_viewers=1)


def test_a_feed_that_is_closed_tells_what_it_has_and_takes_nobody() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as viewer:
            stage.feed.opened()
            stage.tell(epoch(1))
            stage.feed.close()
            assert len(await viewer.next()) == 2
            with pytest.raises(errors.Unavailable, match=STOPPING):
                await viewer.next()
            with pytest.raises(errors.Unavailable, match=STOPPING), stage.feed.viewer():
                pass

    on_stage(play)


def test_an_event_of_a_later_version_is_left_out() -> None:
    async def play(stage: Stage) -> None:
        with stage.feed.viewer() as viewer:
            stage.feed.opened()
            stage.tell(watch_pb2.WatchEvent(time_unix_ns=1), epoch(1))
            assert types(await told(viewer)) == ["here", "epoch"]

    on_stage(play)
