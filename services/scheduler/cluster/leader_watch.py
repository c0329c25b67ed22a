"""The leader watch: a standby tests again and again whether the leader still runs, and tells the
election when the leader is certainly dead. Then the standby need not wait until the lease expires.

A leader is certainly dead in two cases, once it has been reached at its address: the host refuses
connections there; or the address does not answer, and the leader's pod is gone or none of the pod's
containers runs. A leader that only does not answer, for example behind a cut network, may still
run: its lease has to expire. A wrong result of the watch changes leaders without need and breaks
nothing (`leader_elector.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol

from services.common import address as addresses
from services.scheduler.cluster.pod_directory import PodsRefused, PodsUnavailable

log = logging.getLogger(__name__)

PERIOD_S = 0.5
"""Seconds between two tests of the leader."""

CONNECT_TIMEOUT_S = 1.0

AGAIN_S = 0.1
"""Seconds after which an address that refuses connections is tried a second time."""


class ProbeResult(Enum):
    """Result of an attempt to connect to an address."""

    LISTENS = "a process listens there"
    REFUSES = "the host is there and no process listens"
    NONE = "there is no answer"


class Election(Protocol):
    """The properties and methods of `LeaderElector` that the watch needs."""

    @property
    def leader(self) -> str: ...

    @property
    def leader_address(self) -> str: ...

    def note_death(self, holder: str) -> None: ...


async def ask(address: str) -> ProbeResult:
    """Connects to `host:port`, disconnects, and returns whether a process listened there."""
    try:
        host, port = addresses.parse(address)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return ProbeResult.REFUSES
    except (OSError, ValueError):  # a TimeoutError is an OSError; a bad address is a ValueError
        return ProbeResult.NONE
    writer.close()
    return ProbeResult.LISTENS


class LeaderWatch:
    """Watches the leader that the election names, whichever process that is."""

    def __init__(
        self,
        election: Election,
        *,
        pod_has_ended: Callable[[str, str], Awaitable[bool]],
        ask: Callable[[str], Awaitable[ProbeResult]] = ask,
        period_s: float = PERIOD_S,
    ) -> None:
        """Creates a watch. `pod_has_ended` takes the name and the uid of a pod and returns whether
        the pod has ended; it may raise `PodsUnavailable` or `PodsRefused`."""
        self._election = election
        self._pod_has_ended = pod_has_ended
        self._ask = ask
        self._period_s = period_s
        self._reached = ""  # identity of the leader, once it has been reached

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            holder, address = self._election.leader, self._election.leader_address
            if holder and address:
                await self._look(holder, address)
            await asyncio.sleep(self._period_s)

    async def _look(self, holder: str, address: str) -> None:
        answer = await self._ask(address)
        if answer is ProbeResult.LISTENS:
            self._reached = holder
        elif holder == self._reached and await self._is_dead(holder, address, answer):
            self._reached = ""
            self._election.note_death(holder)

    async def _is_dead(self, holder: str, address: str, answer: ProbeResult) -> bool:
        if answer is ProbeResult.REFUSES:
            await asyncio.sleep(AGAIN_S)
            if await self._ask(address) is ProbeResult.REFUSES:
                log.warning("the leader %s is gone: no process listens at %s", holder, address)
                return True
            return False
        try:
            pod_name, pod_uid, _ = holder.split("_")
            has_ended = await self._pod_has_ended(pod_name, pod_uid)
        except (PodsUnavailable, PodsRefused, ValueError) as trouble:
            log.debug("the leader does not answer, and nothing is known of its pod: %s", trouble)
            return False
        if has_ended:
            log.warning("the leader %s is gone: its pod has ended", holder)
        return has_ended
