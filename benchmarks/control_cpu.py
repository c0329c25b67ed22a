"""The processor time that a token costs outside the model, for each process of the control plane.

    python -m benchmarks.control_cpu

A whole local system on real sockets whose rank computes nothing: it sleeps as long as a model
would take, so that iterations have the batches that they would have, and samples the same token
again and again. Clients stream the paper's mixed trace from it. On a machine where the model takes
all cores there are, every 100 us of control for each token are taken from the model.

Processor time hardly depends on what else the machine does, so two versions may be compared by it
where throughput could not.
"""

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

import grpc.aio
import psutil
import uvloop

from benchmarks import load, workload
from benchmarks.grpc_client import GrpcClient
from benchmarks.null_rank import COMPUTE_MS
from benchmarks.openai_client import OpenAIClient
from services.local.child import Child

HOST = "127.0.0.1"
VOCAB_SIZE = 1000  # the null rank's


@dataclass(frozen=True, slots=True)
class Plane:
    """A running control plane: its addresses and its processes by their names."""

    http: str
    grpc: str
    processes: dict[str, psutil.Process]

    def used(self) -> dict[str, "Used"]:
        """Returns the processor time of each process so far, and of this one."""
        processes = {**self.processes, "client": psutil.Process()}
        return {name: Used.by(process) for name, process in processes.items()}


@dataclass(frozen=True, slots=True)
class Used:
    """Processor time in seconds, the kernel's part of it, and the number of voluntary context
    switches."""

    cpu_s: float
    kernel_s: float
    n_sleeps: int

    @classmethod
    def by(cls, process: psutil.Process) -> Self:
        """Returns the use of a process since it started."""
        times = process.cpu_times()
        return cls(times.user + times.system, times.system, process.num_ctx_switches().voluntary)

    def since(self, before: "Used") -> "Used":
        """Returns the use after `before`."""
        return Used(
            self.cpu_s - before.cpu_s,
            self.kernel_s - before.kernel_s,
            self.n_sleeps - before.n_sleeps,
        )


@contextlib.asynccontextmanager
async def null_plane(options: argparse.Namespace) -> AsyncIterator[Plane]:
    """Runs a stage whose rank sleeps, a scheduler and a frontend."""
    os.environ[COMPUTE_MS] = str(options.compute_ms)  # the rank inherits it
    common = ("--log-level=ERROR",)
    children: list[Child] = []
    try:
        stage = await Child.start(
            "controller",
            "benchmarks.null_rank",
            ("--model=.", f"--address={HOST}:0", "--n-threads=1", *common),
        )
        children.append(stage)
        scheduler = await Child.start(
            "scheduler",
            "services.scheduler",
            (
                f"--address={HOST}:0",
                f"--stages={await stage.wait_for('address')}",
                f"--max-batch-size={options.max_batch_size}",
                *common,
            ),
        )
        children.append(scheduler)
        frontend = await Child.start(
            "frontend",
            "services.frontend",
            (
                f"--model={options.model}",
                f"--scheduler={await scheduler.wait_for('address')}",
                f"--http-address={HOST}:0",
                f"--grpc-address={HOST}:0",
                *common,
            ),
        )
        children.append(frontend)
        http = await frontend.wait_for("http")
        yield Plane(f"http://{http}", frontend.said["grpc"], _processes())
    finally:
        for child in reversed(children):
            await child.stop()


def _processes() -> dict[str, psutil.Process]:
    modules = {
        "benchmarks.null_rank": "controller",
        "services.scheduler": "scheduler",
        "services.frontend": "frontend",
    }
    found = {}
    for process in psutil.Process().children():
        (name,) = (name for module, name in modules.items() if module in process.cmdline())
        found[name] = process
        for child in process.children():
            found["rank"] = child
    return found


async def measure(options: argparse.Namespace) -> None:
    """Prints a table."""
    requests = workload.from_options(options, rate=options.rate, vocab_size=VOCAB_SIZE)
    n_tokens = sum(request.n_output for request in requests)
    async with null_plane(options) as plane, contextlib.AsyncExitStack() as stack:
        client: load.Client = OpenAIClient(plane.http, model="null")
        if options.over_grpc:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(plane.grpc))
            client = GrpcClient(channel)
        await load.run(client, requests[:8])
        rounds: list[dict[str, Used]] = []
        elapsed_s: list[float] = []
        for _ in range(options.rounds):
            before, start = plane.used(), time.perf_counter()
            done = await load.run(client, requests)
            elapsed_s.append(time.perf_counter() - start)
            if failed := [record.error for record in done if record.error is not None]:
                raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
            rounds.append({name: now.since(before[name]) for name, now in plane.used().items()})
    print(
        f"{len(requests)} requests, {n_tokens} tokens, {options.compute_ms:g} ms per iteration, "
        f"{n_tokens / min(elapsed_s):.0f} tokens/s"
    )
    print(
        f"{'process':>12} {'us per token':>13} {'in the kernel':>14} {'sleeps':>7}   "
        f"best of {options.rounds} rounds"
    )
    for name in rounds[0]:
        best = min((used[name] for used in rounds), key=lambda used: used.cpu_s)
        print(
            f"{name:>12} {1e6 * best.cpu_s / n_tokens:>13.1f} "
            f"{1e6 * best.kernel_s / n_tokens:>14.1f} {best.n_sleeps / n_tokens:>7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/demo", help="whose tokenizer is used")
    parser.add_argument("--compute-ms", type=float, default=25.0, help="of each iteration")
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--rate", type=float, help="requests a second (default: all at once)")
    parser.add_argument("--over-grpc", action="store_true", help="clients speak gRPC")
    parser.add_argument("--rounds", type=int, default=3)
    workload.add_options(parser)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
