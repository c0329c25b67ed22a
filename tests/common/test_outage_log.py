"""What fails again and again is said in few lines."""

import logging

import pytest

from services.common.outage_log import PEER_PATIENCE_S, REPEAT_S, OutageLog

log = logging.getLogger(__name__)


class World:
    """A log on a clock of its own."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.now_s = 1000.0
        self.outage = OutageLog(
            log,
            failing="things fall",
            works="things fly again",
            counted="fell",
            clock=self.clock,
        )

    def clock(self) -> float:
        return self.now_s

    def fail_for(self, seconds: int) -> None:
        """Fails once a second; then it works."""
        for _ in range(seconds):
            self.outage.failed("rain")
            self.now_s += 1
        self.outage.worked()

    def lines(self) -> list[str]:
        """Returns the lines since the last call."""
        lines = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return lines


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> World:
    return World(caplog)


def test_a_long_outage_is_said_at_its_begin_every_ten_minutes_and_at_its_end(world: World) -> None:
    lines = []
    for _ in range(25 * 60 // 5):
        world.outage.failed("rain", 100)
        lines += world.lines()
        world.now_s += 5
    assert lines == [
        "things fall: rain",
        "things fall: rain; 12000 fell in 600 s",
        "things fall: rain; 24000 fell in 1200 s",
    ]
    world.outage.worked()
    world.outage.worked()
    assert world.lines() == ["things fly again; 30000 fell in 1500 s"]


def test_what_comes_and_goes_is_said_once_in_ten_minutes(world: World) -> None:
    lines = []
    for _ in range(100):
        world.outage.failed("rain", 10)
        world.outage.worked()
        world.now_s += 5
        lines += world.lines()
    assert lines == ["things fall: rain", "things fly again; 10 fell in 0 s"]
    world.now_s += REPEAT_S
    world.outage.failed("hail")
    assert world.lines() == ["things fall: hail; 990 fell in 1095 s"]


def test_nothing_is_said_while_all_is_well(world: World) -> None:
    world.outage.worked()
    assert not world.lines()


def test_an_outage_is_not_counted_with_one_that_was_over_long_before(world: World) -> None:
    world.fail_for(60)
    world.now_s += 40
    world.lines()
    world.fail_for(10)
    assert world.lines() == [], "the last line is too recent"
    world.now_s += REPEAT_S
    world.outage.worked()
    world.now_s += 10 * REPEAT_S
    world.fail_for(5)
    assert world.lines() == ["things fall: rain", "things fly again; 5 fell in 5 s"]


def test_a_peer_that_starts_late_is_no_warning(world: World) -> None:
    world.outage = OutageLog.of_peer(log, "the scheduler at s:1", clock=world.clock)
    for _ in range(3):
        world.fail_for(int(PEER_PATIENCE_S))
    assert world.lines() == []


def test_a_peer_that_is_away_for_long_is_named(world: World) -> None:
    world.outage = OutageLog.of_peer(log, "the worker at [fd00::7]:50053", clock=world.clock)
    world.fail_for(int(PEER_PATIENCE_S + REPEAT_S) + 1)
    assert world.lines() == [
        "the worker at [fd00::7]:50053 cannot be reached: rain; 10 attempts failed in 10 s",
        "the worker at [fd00::7]:50053 cannot be reached: rain; 610 attempts failed in 610 s",
        "the worker at [fd00::7]:50053 answers; 611 attempts failed in 611 s",
    ]
    world.fail_for(3)
    world.now_s += REPEAT_S
    world.fail_for(3)
    assert world.lines() == [], "a short failure is none, however long ago the last one was"
