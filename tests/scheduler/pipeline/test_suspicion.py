"""Suspicions that follow each other become rarer."""

import asyncio

import pytest

from services.scheduler.pipeline.suspicion import MAX_SUSPICION_S, QUIET_S, SUSPICION_S, Suspicion


async def test_each_suspicion_doubles_the_time_and_quiet_minutes_halve_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now, raising=False)
    suspicion = Suspicion()
    assert suspicion.limit_s == SUSPICION_S
    suspicion.note()
    suspicion.note()
    assert suspicion.limit_s == 4 * SUSPICION_S
    now += QUIET_S
    assert suspicion.limit_s == 2 * SUSPICION_S
    now += 60 * QUIET_S
    assert suspicion.limit_s == SUSPICION_S
    for _ in range(50):
        suspicion.note()
    assert suspicion.limit_s == MAX_SUSPICION_S
