"""Writes the annotation of the workers' pods by which Kubernetes chooses the pods to delete first.

When the number of workers is reduced, a ReplicaSet deletes the pods with the lowest cost first
(`controller.kubernetes.io/pod-deletion-cost`, Kubernetes 1.22). Without the annotation, Kubernetes
chooses the pods by its other rules, and nothing else changes. So failures are only logged.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from services.common.outage_log import OutageLog
from services.scheduler.cluster.pod_directory import Pod, PodsRefused, PodsUnavailable

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""Seconds after which pods that could not be annotated are tried again."""


class DeletionCosts:
    """Keeps the deletion costs of the workers' pods up to date: writes each cost that has
    changed."""

    def __init__(
        self,
        pods: Callable[[], Mapping[str, Pod]],
        write: Callable[[str, int], Awaitable[None]],
        *,
        retry_s: float = RETRY_S,
    ) -> None:
        """`pods` returns the known pods by their workers' addresses. `write` sets the cost of a
        pod, by its name, and raises `PodsUnavailable` or `PodsRefused`."""
        self._pods = pods
        self._write = write
        self._retry_s = retry_s
        self._costs: Mapping[str, int] | None = None  # until this scheduler leads
        self._written: dict[str, int] = {}  # by the uid of a pod
        self._has_news = asyncio.Event()
        self._outage = OutageLog(
            log,
            failing="the deletion costs of pods cannot be set",
            works="the deletion costs of pods are set",
            counted="attempts failed",
        )

    def note(self, costs: Mapping[str, int]) -> None:
        """Sets the deletion costs of the workers that are in pipelines, by worker address. All
        other workers have the cost 0. Nothing is written before the first call."""
        self._costs = costs
        self._has_news.set()

    async def run(self) -> None:
        """Writes costs that have changed, until cancelled."""
        while True:
            self._has_news.clear()
            await self._write_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s):
                    await self._has_news.wait()

    async def _write_all(self) -> None:
        if self._costs is None:
            return
        pods = self._pods()
        self._written = {
            pod.uid: self._written[pod.uid] for pod in pods.values() if pod.uid in self._written
        }
        for address, pod in pods.items():
            cost = self._costs.get(address, 0)
            if self._written.get(pod.uid) == cost:
                continue
            try:
                await self._write(pod.name, cost)
            except (PodsUnavailable, PodsRefused) as trouble:
                self._outage.failed(trouble)
                return
            self._outage.worked()
            self._written[pod.uid] = cost
