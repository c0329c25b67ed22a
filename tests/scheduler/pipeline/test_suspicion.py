"""Late iterations are suspected sooner where suspicions are right than where they are wrong."""

import asyncio
from collections.abc import Callable

import pytest

from services.scheduler.core.batch import Batch, Span
from services.scheduler.core.request import Request, RequestId
from services.scheduler.pipeline.lateness import Late, Lateness
from services.scheduler.pipeline.suspicion import MAX_SUSPICION_S, QUIET_S, SUSPICION_S, Suspicion

SILENCE_LIMIT_S = 8.0


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the event loop's clock by some seconds."""
    now = 1000.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now, raising=False)

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    return advance


class Pipe:
    """The lateness of one pipeline beside others, whose iterations are usually quick."""

    def __init__(self, clock: Callable[[float], None], suspicion: Suspicion) -> None:
        self._clock = clock
        self.has_others = True
        self.lateness = Lateness(
            silence_limit_s=SILENCE_LIMIT_S,
            iteration_limit_s=1000.0,
            hang_limit_s=9.0,
            suspicion=suspicion,
            may_suspect=lambda: self.has_others,
        )
        self.lateness.begin(1)
        self.is_silent = False
        self.found: list[Late] = []
        self._iteration = 0
        self.iterate(0.1)

    def send(self) -> None:
        self._iteration += 1
        request = Request(RequestId("a"), [1], 4)
        span = Span(request, 0, 1, [1], True, True, [1])
        self.lateness.note_sent(Batch(self._iteration, (span,), ()))

    def wait(self, seconds: float) -> None:
        """Lets time pass, in which the checks are made as often as usual."""
        for _ in range(round(seconds / 0.1)):
            self._clock(0.1)
            if not self.is_silent:
                self.lateness.note_report(0)
            self.found += self.lateness.look(0.1)

    def iterate(self, seconds: float) -> float | None:
        """Runs an iteration. Returns the seconds that it took if it was suspected."""
        self.send()
        self.wait(seconds)
        return self.lateness.note_returned(self._iteration)


async def test_late_iteration_is_suspected_once_and_given_up_by_the_usual_limit(
    clock: Callable[[float], None],
) -> None:
    pipe = Pipe(clock, Suspicion())
    pipe.send()
    pipe.wait(SUSPICION_S)
    assert pipe.found == []
    pipe.wait(5.0)
    [late] = pipe.found
    assert late.is_suspicion
    assert late.stage_index is None
    pipe.wait(9.0)
    assert [one.is_suspicion for one in pipe.found[:2]] == [True, False]


async def test_iteration_is_not_suspected_while_no_other_pipeline_serves(
    clock: Callable[[float], None],
) -> None:
    pipe = Pipe(clock, Suspicion())
    pipe.has_others = False
    assert pipe.iterate(5.0) is None
    assert pipe.found == []


async def test_suspicion_that_was_right_is_as_quick_the_next_time(
    clock: Callable[[float], None],
) -> None:
    pipe = Pipe(clock, Suspicion())
    for n in range(1, 4):
        assert pipe.iterate(4.0) == pytest.approx(4.0)
        assert len(pipe.found) == n
        pipe.iterate(0.1)
    assert len({late.reason.partition("in ")[2] for late in pipe.found}) == 1


async def test_pipeline_that_has_become_slow_is_suspected_no_more(
    clock: Callable[[float], None],
) -> None:
    pipe = Pipe(clock, Suspicion())
    for _ in range(9):
        pipe.iterate(4.0)
    assert len(pipe.found) == 2


async def test_each_wrong_suspicion_doubles_the_time_and_quiet_minutes_halve_it(
    clock: Callable[[float], None],
) -> None:
    suspicion = Suspicion()
    pipe = Pipe(clock, suspicion)
    pipe.send()
    while not pipe.found:
        pipe.wait(0.1)
    assert pipe.lateness.note_returned(2) is not None
    assert suspicion.limit_s(0.0) == 2 * SUSPICION_S
    suspicion.note_wrong()
    assert suspicion.limit_s(0.0) == 4 * SUSPICION_S
    clock(1.5 * QUIET_S)
    assert suspicion.limit_s(0.0) == 2 * SUSPICION_S
    clock(60 * QUIET_S)
    assert suspicion.limit_s(0.0) == SUSPICION_S
    for _ in range(50):
        suspicion.note_wrong()
    assert suspicion.limit_s(0.0) == MAX_SUSPICION_S


async def test_seconds_in_which_this_process_was_stopped_are_not_learned(
    clock: Callable[[float], None],
) -> None:
    pipe = Pipe(clock, Suspicion())
    pipe.send()
    clock(30.0)
    assert pipe.lateness.look(30.0) == []
    assert pipe.lateness.note_returned(2) is None
    pipe.iterate(6.0)
    assert pipe.found, "an iteration is expected to take less than seconds"


async def test_a_silent_stage_is_lost_sooner_while_an_iteration_is_late(
    clock: Callable[[float], None],
) -> None:
    pipe = Pipe(clock, Suspicion())
    pipe.has_others = False
    pipe.is_silent = True
    pipe.wait(SILENCE_LIMIT_S - 1.0)
    assert pipe.found == [], "no iteration is in flight"
    pipe.is_silent = False
    pipe.wait(0.1)
    pipe.is_silent = True
    pipe.send()
    pipe.wait(3 * SUSPICION_S - 0.2)
    assert pipe.found == []
    pipe.wait(0.5)
    assert pipe.found[0].stage_index == 0
    assert not pipe.found[0].is_suspicion


async def test_a_stage_that_was_lost_too_soon_may_be_silent_for_longer(
    clock: Callable[[float], None],
) -> None:
    suspicion = Suspicion()
    pipe = Pipe(clock, suspicion)
    pipe.has_others = False
    suspicion.note_wrong()
    pipe.is_silent = True
    pipe.send()
    pipe.wait(6 * SUSPICION_S - 0.2)
    assert pipe.found == []
    pipe.wait(0.5)
    assert pipe.found
    for _ in range(9):
        suspicion.note_wrong()
    silent = Pipe(clock, suspicion)
    silent.has_others, silent.is_silent = False, True
    silent.send()
    silent.wait(SILENCE_LIMIT_S + 0.5)
    assert silent.found, "never longer than the limit of any silence"
