"""The leader watch: a standby tests repeatedly whether the leader still runs, and notifies the
election when the leader is dead. Then the standby need not wait until the lease expires.

- An address that accepts connections belongs to the leader, unless the leader's pod is gone when
  the watch first looks: then another process has the address now, and the leader is dead.
- If the address refuses connections, the leader is dead in any of three cases: it was reached
  before; its pod is gone or none of the pod's containers runs; or the refusals last for longer than
  a renewal of the lease, and no renewal was seen.
- If the address does not answer, the leader is dead if its pod is gone or none of the pod's
  containers runs.

A leader that only does not answer, for example behind a cut network, may still run: its lease has
to expire. A leader that renews its lease lives, even if a firewall between the two schedulers
refuses connections. A wrong result of the watch changes leaders without need and breaks nothing
(`leader_elector.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from services.common import address as addresses
from services.scheduler.cluster.pod_directory import PodsRefused, PodState, PodsUnavailable

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

    @property
    def leader_renews(self) -> bool: ...

    def note_death(self, holder: str) -> None: ...


async def ask(address: str) -> ProbeResult:
    """Connects to `host:port` and disconnects. Returns whether a process listened there, refused
    the connection, or gave no answer."""
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


@dataclass(slots=True)
class Watched:
    """The leader that is watched, and what is known of it."""

    holder: str
    """Identity of the leader in the lease."""

    had_pod: bool = False
    """Whether the API server has known the leader's pod."""

    was_reached: bool = False
    """Whether the leader's address has accepted a connection."""

    refused_since: float | None = None
    """Time at which the leader's address first refused a connection, if this process has never
    reached the address. Otherwise None."""

    is_dead: bool = False
    """Whether the watch has notified the election that the leader is dead."""


class LeaderWatch:
    """Watches the leader that the election names, whichever process that is."""

    def __init__(
        self,
        election: Election,
        *,
        pod_state: Callable[[str, str], Awaitable[PodState]],
        ask: Callable[[str], Awaitable[ProbeResult]] = ask,
        period_s: float = PERIOD_S,
        renewal_s: float,
    ) -> None:
        """Creates a watch. `pod_state` takes the name and the uid of a pod. It may raise
        `PodsUnavailable` or `PodsRefused`. A living leader renews its lease within `renewal_s`
        seconds."""
        self._election = election
        self._pod_state = pod_state
        self._ask = ask
        self._period_s = period_s
        self._renewal_s = renewal_s
        self._watched = Watched("")

    async def run(self) -> None:
        """Tests the leader repeatedly until cancelled. Notifies the election of its death once."""
        while True:
            if holder := self._election.leader:
                await self._look(holder, self._election.leader_address)
            await asyncio.sleep(self._period_s)

    async def _look(self, holder: str, address: str) -> None:
        if holder != self._watched.holder:
            self._watched = Watched(holder)
        if self._watched.is_dead:
            return
        reason = await self._reason_for_death(self._watched, address)
        if reason:
            log.warning("the leader %s is gone: %s", holder, reason)
            self._watched.is_dead = True
            self._election.note_death(holder)

    async def _reason_for_death(self, watched: Watched, address: str) -> str:
        """Returns why the leader is taken for dead. Returns an empty text if it may live."""
        if not watched.had_pod:
            state = await self._state_of_pod(watched.holder)
            if state is PodState.GONE:
                return "its pod is gone"
            watched.had_pod = state is not None
        if not address:
            return ""
        answer = await self._ask(address)
        if answer is ProbeResult.LISTENS:
            watched.was_reached, watched.refused_since = True, None
            return ""
        if answer is ProbeResult.REFUSES and (reason := await self._refuses(watched, address)):
            return reason
        if answer is ProbeResult.REFUSES and self._election.leader_renews:
            return ""
        if await self._state_of_pod(watched.holder) in (PodState.GONE, PodState.IDLE):
            return "its pod has ended"
        return ""

    async def _refuses(self, watched: Watched, address: str) -> str:
        """Returns why a leader whose address refuses connections is taken for dead. Returns an
        empty text if the leader may live."""
        if watched.was_reached:
            await asyncio.sleep(AGAIN_S)
            is_refused = await self._ask(address) is ProbeResult.REFUSES
            return f"no process listens at {address}" if is_refused else ""
        now = asyncio.get_running_loop().time()
        if self._election.leader_renews or watched.refused_since is None:
            watched.refused_since = now
        if now - watched.refused_since > self._renewal_s:
            return f"no process listens at {address}, and the lease is not renewed"
        return ""

    async def _state_of_pod(self, holder: str) -> PodState | None:
        """Returns the state of the leader's pod, or None if it cannot be known now."""
        try:
            name, uid, _ = holder.split("_")
            return await self._pod_state(name, uid) if uid else None
        except (PodsUnavailable, PodsRefused, ValueError) as trouble:
            log.debug("nothing is known of the pod of the leader %s: %s", holder, trouble)
            return None
