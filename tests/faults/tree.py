"""The system whose processes are harmed, and the state that it reports."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import httpx
import psutil
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from tests.exposition import Samples
from tests.faults import linked_tree
from tests.system.stack import Stack, serving

Role = Literal["rank", "controller", "scheduler", "frontend", "link to scheduler", "link to worker"]
MODULES: dict[Role, str] = {
    "rank": "services.worker.rank",
    "controller": "services.worker",
    "scheduler": "services.scheduler",
    "frontend": "services.frontend",
}
LINKS: tuple[Role, ...] = ("link to scheduler", "link to worker")
RESTART = re.compile(
    r"orcinus: (.*?) (?:was killed|exited|hung).*(?:starting it again|its spare takes over)"
)
SCRAPE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of the members of a tree."""

    n_pipelines: int
    n_stages: int
    tp_size: int
    n_spares: int = 0

    @property
    def n_frontends(self) -> int:
        """Number of frontends."""
        return 2 if self.n_spares else 1

    def n_of(self, role: Role) -> int:
        """Returns how many members have a role, spares included."""
        n_workers = self.n_pipelines * self.n_stages + self.n_spares
        match role:
            case "rank":
                return n_workers * self.tp_size
            case "controller" | "link to worker":
                return n_workers
            case "scheduler":
                return 2 if self.n_spares else 1
            case "frontend":
                return self.n_frontends
            case _:
                return 1


class Tree:
    """The ranks and controllers of pipelines, a scheduler and a frontend, with links between them,
    under a launcher that restarts lost processes."""

    def __init__(self, stack: Stack, shape: Shape, orders: Path) -> None:
        self.stack = stack
        self.shape = shape
        self._orders = orders
        self._metrics = stack.metrics_urls

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
        name = "scheduler" if link == "link to scheduler" else f"worker {index}"
        reader, writer = await asyncio.open_unix_connection(self._orders)
        try:
            writer.write(f"{name} {what} {for_s}\n".encode())
            await reader.readline()
        finally:
            writer.close()

    @property
    def n_restarts(self) -> int:
        """Number of services that the launcher has restarted."""
        return sum(RESTART.search(line) is not None for line in self.stack.output)

    def scrape(self, service: str) -> Samples | None:
        """Returns the metrics of a service; None where it does not answer."""
        with contextlib.suppress(httpx.TransportError):
            return Samples(httpx.get(self._metrics[service], timeout=SCRAPE_TIMEOUT_S).text)
        return None

    def epoch(self) -> int | None:
        """Returns the newest epoch, if all pipelines serve now."""
        samples = self.scrape("scheduler")
        if samples is None or n_serving(samples) < self.shape.n_pipelines:
            return None
        return int(samples.sum("orcinus_pipeline_epoch"))

    def has_all_workers(self) -> bool:
        """Returns whether each worker serves its stage, or has started and waits as a spare."""
        return all(map(_is_of_use, self.stack.stage_addresses()))

    def has_all_processes(self) -> bool:
        """Returns whether each role is there as often as it should."""
        with contextlib.suppress(psutil.Error):
            self.stack.look_at_tree()
            return all(
                len(self.stack.pids(module)) == self.shape.n_of(role)
                for role, module in MODULES.items()
            )
        return False

    def names_of(self, service: str) -> list[str]:
        """Returns the names of the services of one kind: `frontend` and `frontend 2`."""
        return [name for name in self._metrics if name.split()[0] == service]

    def leftovers(self) -> dict[str, float]:
        """Returns the numbers of resources that are still reserved or in flight, by the names of
        their metrics."""
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
            for each in self.names_of(service):
                samples = self.scrape(each)
                found |= {
                    f"{each}: {name}": samples.sum(name) if samples else float("nan")
                    for name in names
                }
        return {name: value for name, value in found.items() if value != 0}


def _is_of_use(worker: str) -> bool:
    with grpc.insecure_channel(worker) as channel, contextlib.suppress(grpc.RpcError):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        found = stub.Describe(worker_pb2.DescribeRequest(), timeout=SCRAPE_TIMEOUT_S)
        is_spare = found.state == worker_pb2.WORKER_STATE_FREE and bool(found.traits)
        return is_spare or found.state == worker_pb2.WORKER_STATE_READY
    return False


def n_serving(scheduler: Samples) -> int:
    """Returns the number of pipelines that serve, by the metrics of the scheduler."""
    return int(scheduler.sum("orcinus_pipelines"))


@contextlib.contextmanager
def growing(model: Path, shape: Shape, directory: Path, **options: Any) -> Iterator[Tree]:
    """Starts a tree, and ends it with all its processes; its socket is in the directory. `options`
    are further settings of the launcher, and replace those that every tree has."""
    orders = directory / "links"
    with serving(
        model,
        module=linked_tree.__name__,
        environment={linked_tree.SOCKET_VARIABLE: str(orders)},
        pipelines=shape.n_pipelines,
        stages=shape.n_stages,
        tp=shape.tp_size,
        spares=shape.n_spares,
        frontends=shape.n_frontends,
        fail_fast=False,
        metrics=True,
        **{"max_batch_size": 32, "kv_memory": "8MiB", **options},
    ) as stack:
        yield Tree(stack, shape, orders)
