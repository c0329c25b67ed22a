"""The cost of traces: tokens per second with and without OpenTelemetry traces.

    python -m benchmarks.control.tracing

Runs four whole systems side by side on loopback: one with traces switched off
(`OTEL_SDK_DISABLED`), one without an endpoint for traces, one that records one request in twenty,
and one that records all requests. The systems are put under equal load in turn, in random order. In
each round the throughput of a system is divided by the throughput with traces switched off. The
result is the median of these ratios, so that a short disturbance by other work on the machine does
not change it. Spans are sent to a process that only counts bytes. The processor time per token of
each system is compared in the same way; it hardly depends on other work on the machine.

Budgets: traces without an endpoint cost 1 % at most, one request in twenty 3 %.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import uvloop
from orcinus.v1 import inference_pb2, inference_pb2_grpc
from tqdm import tqdm

from services.common.by_model import for_all
from services.local.launcher import Launcher
from services.local.settings import LocalSettings

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
BASELINE = "off"
BUDGETS = {"no endpoint": 0.99, "5 %": 0.97}


def variants(collector: str) -> dict[str, dict[str, str]]:
    """Returns the environment variables of each variant, by the name of the variant."""
    endpoint = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector}",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    }
    return {
        BASELINE: {"OTEL_SDK_DISABLED": "true"},
        "no endpoint": {},
        "5 %": {**endpoint, "OTEL_TRACES_SAMPLER_ARG": "0.05"},
        "100 %": {**endpoint, "OTEL_TRACES_SAMPLER_ARG": "1"},
    }


def collect() -> None:
    """Receives trace spans over gRPC until standard input ends, and then prints the number of
    received bytes. Prints its address first. Runs in a process of its own."""
    n_bytes = 0

    def export(data: bytes, _: grpc.ServicerContext) -> bytes:
        nonlocal n_bytes
        n_bytes += len(data)
        return b""

    handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(export, None, None)}
    service = EXPORT.split("/")[1]
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None).wait()
    print(n_bytes, flush=True)


@dataclass
class System:
    """A running system, and its measurements."""

    address: str
    processes: list[psutil.Process]
    rates: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def cpu_time_s(self) -> float:
        """Returns the processor time, in seconds, that the system's processes have used so far."""
        times = [process.cpu_times() for process in self.processes]
        return float(sum(each.user + each.system for each in times))


@contextlib.asynccontextmanager
async def running(
    arguments: argparse.Namespace, environment: Mapping[str, str]
) -> AsyncIterator[System]:
    """Runs a system inside the context. Its processes have the OpenTelemetry variables (`OTEL_*`)
    of `environment`, and no other variables of this kind."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    os.environ.update(environment)
    settings = LocalSettings(
        model=for_all(arguments.model),
        stages=arguments.stages,
        http_port=0,
        grpc_port=0,
        threads=1,
        fail_fast=True,
    )
    others = set(psutil.Process().children(recursive=True))
    async with Launcher(settings) as launcher:
        endpoints = await launcher.start(lambda *_: None)
        processes = set(psutil.Process().children(recursive=True)) - others
        yield System(endpoints.grpc, list(processes))


async def tokens_per_second(system: System, arguments: argparse.Namespace) -> float:
    """Runs clients that each send one request after the other, and returns their output tokens per
    second in total."""
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=range(5, 5 + 32)))
    options = inference_pb2.GenerationOptions(max_tokens=arguments.tokens, ignore_eos=True)
    request = inference_pb2.GenerateRequest(prompt=prompt, options=options)
    n_left = arguments.requests

    async def client(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        nonlocal n_left
        while n_left > 0:
            n_left -= 1
            await stub.Generate(request)

    async with grpc.aio.insecure_channel(system.address) as channel:
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        started = time.perf_counter()
        await asyncio.gather(*(client(stub) for _ in range(arguments.clients)))
        return float(arguments.requests * arguments.tokens / (time.perf_counter() - started))


async def measure(arguments: argparse.Namespace) -> None:
    """Measures all variants in turn, and prints the table."""
    collector = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.control.tracing", "--collect"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert collector.stdout is not None
    address = (await collector.stdout.readline()).decode().strip()
    async with contextlib.AsyncExitStack() as stack:
        systems = {
            name: await stack.enter_async_context(running(arguments, environment))
            for name, environment in variants(address).items()
        }
        for system in systems.values():
            await tokens_per_second(system, arguments)  # to warm it up
        for _ in tqdm(range(arguments.rounds), leave=False):
            order = list(systems.values())
            random.shuffle(order)
            for system in order:
                cpu_s = system.cpu_time_s()
                system.rates.append(await tokens_per_second(system, arguments))
                system.cpu_s.append(system.cpu_time_s() - cpu_s)
    received, _ = await collector.communicate(b"")
    report(systems, arguments, n_bytes=int(received))


def report(systems: Mapping[str, System], arguments: argparse.Namespace, *, n_bytes: int) -> None:
    """Prints the table of all variants."""
    print(
        f"stages: {arguments.stages}, clients: {arguments.clients}, rounds: {arguments.rounds} of "
        f"{arguments.requests} requests of {arguments.tokens} tokens; {n_bytes / 1e6:.1f} MB sent"
    )
    print(f"{'traces':>12} {'tokens/s':>9} {'ratio':>7} {'quartiles':>15} {'cpu':>7}")
    for name, system in systems.items():
        pairs = zip(system.rates, systems[BASELINE].rates, strict=True)
        ratios = [rate / baseline for rate, baseline in pairs]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        cpu_pairs = zip(system.cpu_s, systems[BASELINE].cpu_s, strict=True)
        cpu = statistics.median(cpu_s / baseline for cpu_s, baseline in cpu_pairs)
        budget = BUDGETS.get(name)
        verdict = "" if budget is None else "  kept" if ratio >= budget else "  BROKEN"
        print(
            f"{name:>12} {statistics.median(system.rates):>9.0f} {ratio:>7.3f} "
            f"{low:>7.3f}-{high:<7.3f} {cpu:>7.3f}{verdict}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collect:
        collect()
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(arguments))


if __name__ == "__main__":
    main()
