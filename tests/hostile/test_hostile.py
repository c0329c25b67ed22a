"""Whatever is sent, or not read: every process lives, within its memory, and answers others.

    make test-hostile ARGS="-k unread"

An attack takes place beside sixteen honest streams, on the real processes. Gaps between tokens are
for `python -m benchmarks.hostile`: other work on the machine would decide over a test of them.
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
from tests.hostile.attack import Attack
from tests.hostile.attacks import ATTACKS, raw_http2, readers
from tests.hostile.helper import Helper, NoAnswer
from tests.hostile.pods import Outcome, PodLost, Pods
from tests.hostile.settings import API_KEY, HONEST_KEY, frontend_options, write_keys

OF_THEIR_OWN = {"idle_connections", "last_epoch"}
"""Attacks that need, or leave, another system than the others."""
WITHOUT_KEY = [
    attack for name, attack in ATTACKS.items() if not attack.needs_key and name not in OF_THEIR_OWN
]
WITH_KEY = ["uploads_under_a_key", "tokenize_storm", "slow_bodies", "unread_streams"]
N_DESCRIPTORS = 1024
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
                attacker = stack.enter_context(hostile_pods.attacker_of(pods))
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
def site() -> Iterator[Site]:
    """A system that asks for no key."""
    with contextlib.closing(Site(frontend=frontend_options())) as site:
        yield site


@pytest.fixture(scope="module")
def site_with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A system that asks for keys; the attacker's allows two answers at once."""
    keys = write_keys(tmp_path_factory.mktemp("keys"))
    options = frontend_options(api_keys_file=keys)
    with contextlib.closing(Site(frontend=options, api_key=API_KEY, honest_key=HONEST_KEY)) as site:
        yield site


@pytest.mark.parametrize("attack", WITHOUT_KEY, ids=lambda attack: attack.name)
def test_an_attack_has_no_success(attack: Attack, site: Site) -> None:
    outcome = site.suffer(attack)
    assert not outcome.faults, outcome


@pytest.mark.parametrize("name", WITH_KEY)
def test_an_attack_under_a_key_has_no_success(name: str, site_with_keys: Site) -> None:
    outcome = site_with_keys.suffer(ATTACKS[name])
    assert not outcome.faults, outcome


def test_a_frontend_with_few_descriptors_outlives_idle_connections() -> None:
    options = frontend_options()
    with contextlib.closing(Site(frontend=options, n_descriptors=N_DESCRIPTORS)) as site:
        outcome = site.suffer(ATTACKS["idle_connections"])
    assert not outcome.faults, outcome


def test_no_epoch_of_a_stranger_makes_a_stage_useless() -> None:
    with contextlib.closing(Site(frontend=frontend_options())) as site:
        outcome = site.suffer(ATTACKS["last_epoch"])
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
