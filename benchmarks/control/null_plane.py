"""A whole local system on real sockets whose ranks compute nothing: the control plane alone."""

import argparse
import contextlib
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Self

import psutil

from benchmarks.control.null_model import COMPUTE_MS
from services.local.child import Child

HOST = "127.0.0.1"
COMMON = ("--log-level=ERROR",)
"""Command-line options of all processes of a plane."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a running control plane by kind, and the URL of its metrics."""

    metrics: str
    """URL of the scheduler's metrics."""
    processes: dict[str, list[psutil.Process]]

    def used(self) -> dict[str, "Used"]:
        """Returns the processor time used so far by the processes of each kind, by the name of the
        kind. This process, as the kind `client`, is included."""
        processes = {**self.processes, "client": [psutil.Process()]}
        return {name: Used.by(of_kind) for name, of_kind in processes.items()}


@dataclass(frozen=True, slots=True)
class Plane(Processes):
    """A running control plane with the addresses of its frontend and its scheduler."""

    http: str
    grpc: str
    scheduler: str


@dataclass(frozen=True, slots=True)
class Used:
    """Processor time of some processes in seconds, the part of it spent in the kernel, and the
    number of voluntary context switches."""

    cpu_s: float
    kernel_s: float
    n_sleeps: int

    @classmethod
    def by(cls, processes: Sequence[psutil.Process]) -> Self:
        """Returns the processor time and context switches of `processes`, each counted from the
        start of the process and summed."""
        times = [process.cpu_times() for process in processes]
        kernel_s = sum(one.system for one in times)
        return cls(
            sum(one.user for one in times) + kernel_s,
            kernel_s,
            sum(process.num_ctx_switches().voluntary for process in processes),
        )

    def since(self, before: "Used") -> "Used":
        """Returns the processor time and context switches since the earlier measurement `before` of
        the same processes."""
        return Used(
            self.cpu_s - before.cpu_s,
            self.kernel_s - before.kernel_s,
            self.n_sleeps - before.n_sleeps,
        )


@contextlib.asynccontextmanager
async def null_plane(
    options: argparse.Namespace,
    *,
    compute_ms: float,
    max_batch_size: int,
    max_batch_tokens: int,
    n_pipelines: int = 1,
) -> AsyncIterator[Plane]:
    """Runs a control plane inside the context: a pipeline of one stage, whose rank sleeps, a
    scheduler and a frontend. With several pipelines, one process has the stages of all
    (`null_stages.py`)."""
    async with contextlib.AsyncExitStack() as children:
        scheduler = await _start_scheduler(
            children,
            compute_ms=compute_ms,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            n_pipelines=n_pipelines,
        )
        address = scheduler.said["address"]
        frontend = await start_frontend(options, address)
        children.push_async_callback(frontend.stop)
        http = await frontend.wait_for("http")
        yield Plane(
            _metrics_of(scheduler),
            _processes(),
            f"http://{http}",
            frontend.said["grpc"],
            address,
        )


@contextlib.asynccontextmanager
async def plane_of_streams(
    n_streams: int,
    answer_tokens: Sequence[int],
    *,
    n_frontends: int,
    compute_ms: float,
    max_batch_size: int,
    max_batch_tokens: int,
    n_pipelines: int = 1,
) -> AsyncIterator[Processes]:
    """Runs a control plane without a frontend inside the context. One process with `n_frontends`
    connections to the scheduler sends the requests of `n_streams` streams (`null_frontends.py`)."""
    async with contextlib.AsyncExitStack() as children:
        scheduler = await _start_scheduler(
            children,
            compute_ms=compute_ms,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            n_pipelines=n_pipelines,
        )
        streams = await Child.start(
            "streams",
            "benchmarks.control.null_frontends",
            (
                f"--scheduler={scheduler.said['address']}",
                f"--n={n_frontends}",
                f"--streams={n_streams}",
                "--answer-tokens",
                *map(str, answer_tokens),
            ),
        )
        children.push_async_callback(streams.stop)
        await streams.wait_for("ready")
        yield Processes(_metrics_of(scheduler), _processes())


async def _start_scheduler(
    children: contextlib.AsyncExitStack,
    *,
    compute_ms: float,
    max_batch_size: int,
    max_batch_tokens: int,
    n_pipelines: int,
) -> Child:
    """Starts the stages and a scheduler, and returns the scheduler when it has reported its
    address."""
    os.environ[COMPUTE_MS] = str(compute_ms)  # the ranks inherit it
    if n_pipelines == 1:
        stages = await _start_stage(children)
    else:
        stages = await _start_stages(children, n_pipelines)
    scheduler = await Child.start(
        "scheduler",
        "services.scheduler",
        (
            f"--address={HOST}:0",
            f"--stages={stages}",
            "--n-stages=1",
            f"--max-batch-size={max_batch_size}",
            f"--max-batch-tokens={max_batch_tokens}",
            f"--metrics-address={HOST}:0",
            *COMMON,
        ),
    )
    children.push_async_callback(scheduler.stop)
    await scheduler.wait_for("address")
    return scheduler


def _metrics_of(scheduler: Child) -> str:
    return f"http://{scheduler.said['metrics']}/metrics"


async def _start_stage(children: contextlib.AsyncExitStack) -> str:
    """Starts the process of a stage, and returns the stage's address."""
    stage = await Child.start(
        "controller",
        "benchmarks.control.null_rank",
        ("--model=.", f"--address={HOST}:0", "--n-threads=1", *COMMON),
    )
    children.push_async_callback(stage.stop)
    return str(await stage.wait_for("address"))


async def _start_stages(children: contextlib.AsyncExitStack, n_stages: int) -> str:
    """Starts one process that has `n_stages` stages, and returns their addresses, separated by
    commas."""
    stages = await Child.start("stages", "benchmarks.control.null_stages", (f"--n={n_stages}",))
    children.push_async_callback(stages.stop)
    return str(await stages.wait_for("addresses"))


async def start_frontend(
    options: argparse.Namespace, scheduler: str, settings: Sequence[str] = ()
) -> Child:
    """Starts a frontend that connects to the scheduler at the address `scheduler`."""
    return await Child.start(
        "frontend",
        "services.frontend",
        (
            f"--model={options.model}",
            f"--scheduler={scheduler}",
            f"--http-address={HOST}:0",
            f"--grpc-address={HOST}:0",
            *settings,
            *COMMON,
        ),
    )


def _processes() -> dict[str, list[psutil.Process]]:
    modules = {
        "benchmarks.control.null_rank": "controller",
        "benchmarks.control.null_stages": "stages",
        "benchmarks.control.null_frontends": "streams",
        "services.scheduler": "scheduler",
        "services.frontend": "frontend",
    }
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for process in psutil.Process().children():
        (name,) = (name for module, name in modules.items() if module in process.cmdline())
        found[name].append(process)
        for child in process.children():
            found["rank"].append(child)
    return dict(found)
