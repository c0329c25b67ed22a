"""The workers' pods, and their addresses.

The pods are listed once and then watched; after any error they are listed again. A pod is in the
directory as soon as it has an IP address. The worker in the pod itself reports its stage, and
whether it is ready to join.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from services.common.address import Address
from services.common.errors import Unavailable

log = logging.getLogger(__name__)

OVER = ("Failed", "Succeeded")

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 30.0
LASTING_WATCH_S = 10.0
"""Seconds after which a watch counts as lasting. A watch that ends sooner, even without an error,
is followed by a longer pause than the watch before, so that a server or proxy that ends every watch
at once does not get too many calls."""

REFUSED_LIMIT_S = 30.0
"""Seconds for which refusals are tolerated: an API server that has just started may refuse calls,
and so may a server that gets a token that is being replaced."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The fields of a pod that the scheduler uses."""

    name: str
    uid: str
    created: str
    """Time of creation as text, RFC 3339 in UTC; texts sort in the order of the times."""

    phase: str = "Running"
    ip: str = ""
    is_terminating: bool = False


class PodState(Enum):
    """The states of a pod, according to the API server."""

    RUNS = "one of its containers runs"
    IDLE = "none of its containers runs: they start, have ended, or wait to be started again"
    GONE = "there is no such pod"


class PodChange(Enum):
    """The kinds of events in a watch."""

    SET = "the pod is new or has changed"
    DELETED = "the pod is gone"
    NONE = "only the version has moved on"


@dataclass(frozen=True, slots=True)
class PodEvent:
    """One event of a watch of pods."""

    change: PodChange
    version: str
    pod: Pod | None = None


class PodsExpired(Exception):
    """Raised when the version from which to watch is too old; the pods have to be listed again."""


class PodsUnavailable(Exception):
    """Raised when the pods could not be listed or watched; another attempt may succeed."""


class PodsRefused(Exception):
    """Raised when the API server refuses to let this process list or watch pods."""


class PodsForbidden(Unavailable):
    """Raised when the API server has never let this process watch pods, and has refused for
    `REFUSED_LIMIT_S`: its access rights are configured wrongly."""


class PodSource(Protocol):
    """A source of pods, which can be listed and watched. Every call may raise `PodsUnavailable` or
    `PodsRefused`."""

    async def list_pods(self) -> tuple[Sequence[Pod], str]:
        """Returns all pods, and the version from which to watch for changes."""
        ...

    def watch_pods(self, version: str) -> AsyncIterator[PodEvent]:
        """Yields the changes since a version, until the server ends the watch. The first event has
        the change `NONE` and says that the watch is open.

        Raises:
            PodsExpired: the version is too old.
        """
        ...


class PodDirectory:
    """The addresses of the workers' pods, kept up to date by `run`."""

    def __init__(
        self,
        source: PodSource,
        *,
        n_stages: int,
        port: int,
        refused_limit_s: float = REFUSED_LIMIT_S,
        first_pause_s: float = FIRST_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._source = source
        self._n_stages = n_stages
        self._port = port
        self._refused_limit_s = refused_limit_s
        self._first_pause_s = first_pause_s
        self._clock = clock
        self._jitter = jitter
        self._pods: dict[str, Pod] = {}  # by uid: two pods may have one name for a while
        self._reachable: dict[str, Pod] = {}  # by address
        self._shared: list[tuple[str, list[str]]] = []  # addresses of several pods, and their names
        self._has_changed = asyncio.Event()  # replaced by a new one at each change
        self._version: str | None = None  # to watch from; None asks for a new list
        self._trouble = ""
        self._refused_at: float | None = None  # first refusal since a call last succeeded
        self._was_allowed = False

    @property
    def n_stages(self) -> int:
        """Number of stages of the pipeline."""
        return self._n_stages

    def addresses(self) -> list[str]:
        """Returns the `host:port` of every pod that can be reached, older ones first."""
        return list(self._reachable)

    def pods(self) -> dict[str, Pod]:
        """Returns the pods that can be reached, by their addresses, older ones first."""
        return dict(self._reachable)

    def leaving(self) -> list[str]:
        """Returns the `host:port` of the pods that are terminating and may still serve."""
        pods = [pod for pod in self._pods.values() if pod.is_terminating]
        return list(self._by_address(pods))

    async def changed(self) -> None:
        """Waits until the addresses change."""
        await self._has_changed.wait()

    async def run(self) -> None:
        """Keeps the list of pods up to date until cancelled. Failures of the API server do not end
        the updates. If this process loses the right to list pods later, waits until it has the
        right again, because the known workers still serve.

        Raises:
            PodsForbidden: this process may not list or watch pods.
        """
        n_short = 0
        while True:
            started_at = self._clock()
            try:
                await self._follow()
            except (PodsUnavailable, PodsRefused) as trouble:
                self._version = None
                self._report(str(trouble))
                self._check_refusal(trouble)
            is_short = self._clock() - started_at < LASTING_WATCH_S
            n_short = n_short + 1 if is_short else 0
            await asyncio.sleep(self._pause_s(n_short))

    async def _follow(self) -> None:
        """Lists the pods if necessary, and watches them until the server ends the watch."""
        if self._version is None:
            pods, self._version = await self._source.list_pods()
            self._pods = {pod.uid: pod for pod in pods}
            self._update()
        try:
            async for event in self._source.watch_pods(self._version):
                self._report("")
                self._refused_at, self._was_allowed = None, True
                self._version = event.version
                self._apply(event)
        except PodsExpired:
            self._version = None

    def _apply(self, event: PodEvent) -> None:
        if event.pod is None:
            return
        if event.change is PodChange.SET:
            self._pods[event.pod.uid] = event.pod
        else:
            self._pods.pop(event.pod.uid, None)
        self._update()

    def _update(self) -> None:
        """Updates the addresses: one for each pod that has an IP address and is not ending. Several
        pods may have one address, for example if they use the network of their node. They count as
        one worker, because only one of them can listen at the address."""
        before = list(self._reachable)
        pods = self._by_address([pod for pod in self._pods.values() if not pod.is_terminating])
        self._reachable = {address: sharing[0] for address, sharing in pods.items()}
        self._note_shared(pods)
        if list(self._reachable) != before:
            log.info("workers: %s", ", ".join(self._reachable) or "none")
            self._has_changed.set()
            self._has_changed = asyncio.Event()

    def _by_address(self, pods: Sequence[Pod]) -> dict[str, list[Pod]]:
        """Returns the pods in `pods` that have an IP address and have not ended, by address, older
        ones first."""
        found: dict[str, list[Pod]] = {}
        for pod in sorted(pods, key=lambda pod: (pod.created, pod.name)):
            if pod.ip and pod.phase not in OVER:
                found.setdefault(str(Address(pod.ip, self._port)), []).append(pod)
        return found

    def _note_shared(self, pods: Mapping[str, Sequence[Pod]]) -> None:
        """Logs each address that several pods share, unless the last update found the same pods at
        it."""
        shared = [
            (address, [pod.name for pod in sharing])
            for address, sharing in pods.items()
            if len(sharing) > 1
        ]
        for address, names in shared:
            if (address, names) not in self._shared:
                log.warning("pods %s have one address, %s", ", ".join(names), address)
        self._shared = shared

    def _report(self, trouble: str) -> None:
        """Logs a problem with the pods, unless the problem was the last one logged. An empty text
        means that the pods can be watched."""
        if trouble and trouble != self._trouble:
            log.warning("pods cannot be watched: %s", trouble)
        elif self._trouble and not trouble:
            log.info("pods are watched again")
        self._trouble = trouble

    def _check_refusal(self, trouble: PodsUnavailable | PodsRefused) -> None:
        if self._was_allowed or not isinstance(trouble, PodsRefused):
            self._refused_at = None
            return
        now = self._clock()
        if self._refused_at is None:
            self._refused_at = now
        if now - self._refused_at >= self._refused_limit_s:
            raise PodsForbidden(f"the workers cannot be found: {trouble}") from trouble

    def _pause_s(self, n_short: int) -> float:
        """Returns the pause before the next watch, in seconds: 0 after a watch that lasted, and a
        longer pause with each of `n_short` short watches in a row. The pause is random, so that
        several processes do not call at once."""
        if n_short == 0:
            return 0.0
        longest = min(MAX_PAUSE_S, self._first_pause_s * 2.0 ** min(n_short - 1, 16))
        return longest * (1 + self._jitter()) / 2
