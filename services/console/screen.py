"""Shows the events of a source: on a terminal, redrawn eight times per second, or as lines of
text."""

import queue
import sys
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live

from services.console.console_state import NO_FIGURES, ConsoleState
from services.console.feed import END, Feed, Json
from services.console.render import Screen, lines, summary

FRAME_S = 1 / 8
MAX_PER_FRAME = 20_000
LAG_S = 0.3
"""Seconds by which the shown time is behind the present time.

The delay is needed because the event of an iteration arrives up to a quarter of a second late.
"""
QUIET_S = 1.0
"""Shortest interval in seconds between two summary lines in the output of `write`."""


class BrokenFeed(Exception):
    """The source of events ended with an error. The message is the text of that error."""


def show(feed: Feed, console: Console) -> None:
    """Shows the events of a source on a terminal until Ctrl-C. When the source ends, the last
    screen stays.

    Raises:
        BrokenFeed: the source ended with an error.
    """
    state = ConsoleState()
    clock = _Clock()
    feed.start()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            for event in _waiting(feed):
                if event["type"] == END["type"]:
                    _check(event)
                    clock.stop()
                else:
                    _feed(state, event)
            screen = Screen(
                console.width,
                console.height,
                console.color_system is not None and not console.no_color,
            )
            now = clock.now(state.now)
            live.update(Group(*lines(state, screen, now=now)), refresh=True)
            time.sleep(max(0.0, FRAME_S - (time.monotonic() - began)))


def write(feed: Feed) -> None:
    """Writes the events of a source to standard output, as lines, until the source ends.

    There is a line for each mark, which is a notable event such as a new epoch, and at most one
    summary per second while iterations run.

    Raises:
        BrokenFeed: the source ended with an error.
    """
    state = ConsoleState()
    n_marks, said_at = 0, 0.0
    feed.start()
    while (event := feed.events.get())["type"] != END["type"]:
        _feed(state, event)
        new = min(state.n_marks - n_marks, len(state.marks))
        for mark in list(state.marks)[len(state.marks) - new :]:
            _line(mark.t, str(mark))
        n_marks = state.n_marks
        if state.figures is NO_FIGURES or event["type"] != "iteration":
            continue
        if abs(state.now - said_at) >= QUIET_S:
            said_at = state.now
            _line(state.now, summary(state))
    _check(event)


class _Clock:
    """Estimates the time of the scheduler's clock between two events.

    Because of this estimate the lanes move on while no event arrives.
    """

    def __init__(self) -> None:
        self._latest = 0.0
        self._heard = time.monotonic()
        self._is_stopped = False

    def now(self, latest: float) -> float:
        """Returns the estimated time of the scheduler's clock minus `LAG_S`, in seconds. The drawn
        lanes end at this time. `latest` is the time of the latest event. After `stop` was called,
        returns `latest` itself."""
        if latest != self._latest:
            self._latest, self._heard = latest, time.monotonic()
        return latest if self._is_stopped else latest - LAG_S + time.monotonic() - self._heard

    def stop(self) -> None:
        """Stops the clock, because the source has ended."""
        self._is_stopped = True


def _waiting(feed: Feed) -> Iterator[Json]:
    for _ in range(MAX_PER_FRAME):
        try:
            yield feed.events.get_nowait()
        except queue.Empty:
            return


def _feed(state: ConsoleState, event: Json) -> None:
    try:
        state.feed(event)
    except ValueError as error:
        raise BrokenFeed(str(error)) from error


def _check(end: Json) -> None:
    if "error" in end:
        raise BrokenFeed(end["error"])


def _line(t: float, text: str) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(t)) if t else "--:--:--"
    sys.stdout.write(f"{at} {text}\n")
    sys.stdout.flush()
