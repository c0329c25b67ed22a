"""What the log says of a peer that cannot be reached."""

import logging

import pytest

from services.common.outage import AGAIN_S, LASTING_S, Outage


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_outage_that_lasts_is_a_warning_with_the_address_every_ten_minutes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    outage = Outage("the worker at [fd00::7]:50053", clock=clock)
    for _ in range(int(LASTING_S + AGAIN_S) + 1):
        outage.note_failure("refused")
        clock.now += 1.0
    outage.note_answer()
    outage.note_answer()
    told = "the worker at [fd00::7]:50053 cannot be reached"
    assert [(it.levelname, it.message) for it in caplog.records] == [
        ("WARNING", f"{told} for 10 s: refused"),
        ("WARNING", f"{told} for 610 s: refused"),
        ("INFO", "the worker at [fd00::7]:50053 answers"),
    ]


def test_a_peer_that_starts_late_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    outage = Outage("the scheduler at s:1", clock=clock)
    for _ in range(3):
        outage.note_failure("refused")
        clock.now += LASTING_S - 1.0
        outage.note_failure("refused")
        outage.note_answer()
    assert caplog.messages == []
