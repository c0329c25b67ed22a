"""The system whose members are harmed, and what it says of itself."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import psutil

from tests.exposition import Samples
from tests.faults import linked_tree
from tests.system.stack import Stack, serving

Role = Literal["rank", "controller", "scheduler", "frontend", "link to scheduler", "link to stage"]
MODULES: dict[Role, str] = {
    "rank": "services.worker.rank",
    "controller": "services.worker",
    "scheduler": "services.scheduler",
    "frontend": "services.frontend",
}
N_STAGES, TP_SIZE = 2, 2
N_OF_ROLE: dict[Role, int] = {
    "rank": N_STAGES * TP_SIZE,
    "controller": N_STAGES,
    "scheduler": 1,
    "frontend": 1,
    "link to scheduler": 1,
    "link to stage": N_STAGES,
}
LINKS: tuple[Role, ...] = ("link to scheduler", "link to stage")
RESTART = re.compile(r"orcinus: (.*?) (?:was killed|exited|hung).*starting it again")
WINDOW_S = 60.0
SCRAPE_TIMEOUT_S = 2.0


class Tree:
    """Two stages of two ranks, a scheduler and a frontend, with links between them, under a
    launcher that starts again what is lost."""

    def __init__(self, stack: Stack, orders: Path) -> None:
        self.stack = stack
        self._orders = orders
        self._metrics = stack.metrics_urls
        self._struck: list[tuple[str, float]] = []

    def pid(self, role: Role, index: int) -> int | None:
        """Returns the process that has a role now, if it has been started and not ended."""
        with contextlib.suppress(psutil.Error, IndexError):
            self.stack.look_at_tree()
            return self.stack.pids(MODULES[role])[index]
        return None

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Signals a process; returns whether it was still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    async def disturb(self, link: Role, index: int, what: str, for_s: float) -> None:
        """Makes a link `cut` or `silence` for a time, and returns when it is over."""
        name = "scheduler" if link == "link to scheduler" else f"stage {index}"
        reader, writer = await asyncio.open_unix_connection(self._orders)
        try:
            writer.write(f"{name} {what} {for_s}\n".encode())
            await reader.readline()
        finally:
            writer.close()

    def note_strike(self, role: Role, index: int) -> None:
        """Notes that the launcher may have to start a service again."""
        self._struck.append((service_of(role, index), time.monotonic()))

    def may_lose(self, role: Role, index: int, *, limit: int) -> bool:
        """Returns whether a service was harmed fewer than `limit` times within the launcher's
        window: one that dies too often is not started again."""
        since = time.monotonic() - WINDOW_S
        service = service_of(role, index)
        return sum(name == service and at > since for name, at in self._struck) < limit

    @property
    def n_restarts(self) -> int:
        """Services that the launcher says it has started again."""
        return sum(RESTART.search(line) is not None for line in self.stack.output)

    def scrape(self, service: str) -> Samples | None:
        """Returns the metrics of a service; None where it does not answer."""
        with contextlib.suppress(httpx.TransportError):
            return Samples(httpx.get(self._metrics[service], timeout=SCRAPE_TIMEOUT_S).text)
        return None

    def epoch(self) -> int | None:
        """Returns the epoch that serves now, if there is one."""
        samples = self.scrape("scheduler")
        if samples is None or not samples.sum("orcinus_pipeline_up"):
            return None
        return int(samples.sum("orcinus_pipeline_epoch"))

    def has_all_processes(self) -> bool:
        """Returns whether each role is there as often as it should."""
        with contextlib.suppress(psutil.Error):
            self.stack.look_at_tree()
            return all(
                len(self.stack.pids(module)) == N_OF_ROLE[role] for role, module in MODULES.items()
            )
        return False

    def leftovers(self) -> dict[str, float]:
        """Returns what is still reserved or in flight, by the metric that says so."""
        found: dict[str, float] = {}
        for service, names in {
            "scheduler": (
                "orcinus_requests_waiting",
                "orcinus_requests_running",
                "orcinus_kv_cache_usage_ratio",
                "orcinus_kv_cache_allocated_ratio",
            ),
            "frontend": (
                "orcinus_frontend_answers_in_flight",
                "orcinus_frontend_answers_held",
            ),
        }.items():
            samples = self.scrape(service)
            found |= {name: samples.sum(name) if samples else float("nan") for name in names}
        return {name: value for name, value in found.items() if value != 0}


def service_of(role: Role, index: int) -> str:
    """Returns the launcher's name of the service that ends with a process."""
    match role:
        case "rank":
            return f"stage {index // TP_SIZE}"
        case "controller" | "link to stage":
            return f"stage {index}"
        case "link to scheduler":
            return "scheduler"
        case _:
            return role


@contextlib.contextmanager
def growing(model: Path, directory: Path) -> Iterator[Tree]:
    """Starts a tree, and ends it with all its processes; its socket is in the directory."""
    orders = directory / "links"
    with serving(
        model,
        module=linked_tree.__name__,
        environment={linked_tree.SOCKET_VARIABLE: str(orders)},
        stages=N_STAGES,
        tp=TP_SIZE,
        fail_fast=False,
        metrics=True,
        max_batch_size=32,
        kv_memory="8MiB",
    ) as stack:
        yield Tree(stack, orders)
