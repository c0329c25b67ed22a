"""Whatever is sent, or not read: every process lives, within its memory, and answers others.

    make test-hostile ARGS="-k unread"

An attack takes place beside sixteen honest streams, on the real processes. Gaps between tokens are
for `benchmarks.serving.hostile`: other work on the machine would decide over a test of them.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from tests.hostile import pods as hostile_pods
from tests.hostile.attack import Attack, SystemName
from tests.hostile.attacks import ATTACKS, raw_http2, readers
from tests.hostile.helper import Helper, NoAnswer
from tests.hostile.pods import Outcome, PodLost, Pods
from tests.hostile.settings import frontend_options, systems

WITH_KEY = ("tokenize_storm", "slow_bodies", "unread_streams")
"""Attacks that must have no success either when they show a key."""
CASES = [
    *(pytest.param(attack, attack.system, id=name) for name, attack in ATTACKS.items()),
    *(pytest.param(ATTACKS[name], "keys", id=f"{name}_with_a_key") for name in WITH_KEY),
]
STOP_LIMIT_S = 12.0
"""Seconds that a frontend has to end: five to drain, and as many for a busy machine."""


class Site:
    """A system that is attacked, and its attacker and honest clients; another one when an attack
    had success, so that the next begins with a system that is well."""

    def __init__(self, **system: Any) -> None:
        self._system = system
        self._running: ExitStack | None = None
        self._parts: tuple[Pods, Helper, Helper]

    def suffer(self, attack: Attack) -> Outcome:
        """Attacks once."""
        if self._running is None:
            with ExitStack() as stack:
                pods = stack.enter_context(hostile_pods.running(**self._system))
                attacker = stack.enter_context(hostile_pods.attacker_of(pods.target))
                witness = stack.enter_context(hostile_pods.witness_of(pods))
                self._parts = pods, attacker, witness
                self._running = stack.pop_all()
        pods, attacker, witness = self._parts
        try:
            outcome = pods.suffer(attack, attacker, witness)
        except (PodLost, NoAnswer):
            self.close()
            raise
        if outcome.faults:
            self.close()
        return outcome

    def close(self) -> None:
        """Ends the system."""
        if self._running is not None:
            self._running.close()
            self._running = None


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[SystemName, Site]]:
    """The systems, each of which starts with its first attack."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(contextlib.closing(Site(**system)))
            for name, system in systems(tmp_path_factory.mktemp("keys")).items()
        }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("attack", "system"), CASES)
def test_an_attack_has_no_success(
    attack: Attack, system: SystemName, sites: dict[SystemName, Site]
) -> None:
    outcome = sites[system].suffer(attack)
    assert not outcome.faults, outcome


async def test_a_frontend_stops_while_its_health_is_watched_and_not_read() -> None:
    with hostile_pods.running(frontend=frontend_options(linger_s=1)) as pods:
        frontend = pods.processes["frontend"]
        header_block = raw_http2.block(pods.target, readers.WATCH)
        connection = await raw_http2.Connection.open(pods.target, initial_window_size=0)
        for stream in range(1, 41, 2):
            await connection.send(raw_http2.call(stream, header_block, b""))
        await asyncio.sleep(0.5)  # for the watches to begin
        start_s = time.monotonic()
        frontend.send_signal(signal.SIGTERM)
        gone, _ = await asyncio.to_thread(psutil.wait_procs, [frontend], STOP_LIMIT_S)
        await connection.close()
    assert gone, f"still there {time.monotonic() - start_s:.0f} s after SIGTERM"
