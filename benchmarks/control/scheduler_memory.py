"""The memory that a scheduler needs for the requests of frontends, and for updates that frontends
have not read yet.

    python -m benchmarks.control.scheduler_memory

For each line of the table, a separate process receives submissions in the wire format like a
scheduler, without running an iteration. The factors in `services/scheduler/settings.py` are from
these measurements.
"""

import argparse
import asyncio
import multiprocessing
import random
import resource
import sys
from collections.abc import Callable
from importlib import import_module

from orcinus.v1 import sampling_pb2, scheduler_pb2

from services.common.metrics import new_registry
from services.scheduler.core.batch import Update
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.span_logprobs import SpanLogprobs
from services.scheduler.fleet import Fleet
from services.scheduler.frontend_stream import UPDATE_BYTES, FrontendStream
from services.scheduler.observing.iteration_observer import IterationObservers
from services.scheduler.observing.metrics import SchedulerMetrics
from services.scheduler.service import SchedulerService
from services.scheduler.serving_loop import ServingLoop
from services.scheduler.settings import FRONTEND_BYTES

MAX_UPDATES = FRONTEND_BYTES // UPDATE_BYTES
MAX_WITH_LOGPROBS = FRONTEND_BYTES // (UPDATE_BYTES + 200)

REQUEST_ID = "cmpl-0123456789abcdef0123456789abcdef-"
VOCAB_SIZE = 150_000


def resident_bytes() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class NoEngine:
    """A substitute for the engine of a serving loop that is never started."""

    async def run(self, batch: object) -> None:
        raise AssertionError("a loop that does not run sends no batch")

    def take_results(self) -> list[object]:
        return []


def service_for(n_requests: int) -> SchedulerService:
    scheduler = Scheduler(
        RequestPool(max_requests=n_requests),
        KVManager(n_blocks=2**20, block_size=16),
        policy=ChunkedPolicy(max_batch_size=32, max_batch_tokens=512),
        pipeline_depth=2,
    )
    observer = SchedulerMetrics(new_registry()).requests
    service = SchedulerService(observer)
    loop = ServingLoop(
        scheduler,
        NoEngine(),  # type: ignore[arg-type]
        deliver=service.deliver,
        iterations=IterationObservers(),
        requests=observer,
        has_news=asyncio.Event(),
    )
    pipeline = scheduler_pb2.PipelineDescription(
        model="m", vocab_size=VOCAB_SIZE, max_model_len=2**24
    )
    service.lead()
    fleet = Fleet(scheduler.pool)
    fleet.open(0, loop)
    service.open(pipeline, fleet)
    return service


def submit(n_requests: int, n_tokens: int, n_stops: int) -> tuple[int, int]:
    """Submits `n_requests` requests with `n_tokens` prompt tokens and `n_stops` stop tokens each.
    Returns the process's memory before and after, in bytes."""
    service, connection = service_for(n_requests), FrontendStream()
    submission = scheduler_pb2.Submission(
        prompt_token_ids=[70_000 + index % 60_000 for index in range(n_tokens)],
        max_new_tokens=16,
        sampling=sampling_pb2.SamplingParams(
            temperature=1, seed=1, stop_token_ids=range(100_000, 100_000 + n_stops)
        ),
    )
    before = resident_bytes()
    for index in range(n_requests):
        submission.request_id = f"{REQUEST_ID}{index}"
        data = scheduler_pb2.ConnectRequest(submission=submission).SerializeToString()
        service._take(connection, scheduler_pb2.ConnectRequest.FromString(data))
    if len(connection.requests) != n_requests:
        raise RuntimeError(connection._outbox.rejected[0].message)
    return before, resident_bytes()


def fill_outbox(n_updates: int, n_bytes: int) -> tuple[int, int]:
    """Queues `n_updates` updates with `n_bytes` of log-probabilities each for a frontend that does
    not read. Returns the process's memory before and after, in bytes."""
    connection = FrontendStream()
    requests = [Request(RequestId(f"{REQUEST_ID}{index}"), [1], 10**6) for index in range(64)]
    before = resident_bytes()
    for index in range(n_updates):
        logprobs = SpanLogprobs(random.randbytes(n_bytes)) if n_bytes else None
        update = Update(requests[index % 64], 70_000, None, 1000 + index, logprobs=logprobs)
        connection.update([update])
    return before, resident_bytes()


def start() -> tuple[int, int]:
    """Imports all modules of a scheduler in Kubernetes. Returns 0, as the memory before, and the
    process's memory afterwards, in bytes."""
    import_module("services.scheduler.__main__")
    import_module("services.scheduler.cluster.kubernetes_client")
    return 0, resident_bytes()


CASES: dict[str, tuple[Callable[..., tuple[int, int]], tuple[int, ...], int]] = {
    "a process": (start, (), 1),
    "1,024 requests of 1 token": (submit, (1024, 1, 1), 1024),
    "1,024 requests with 256 stop tokens": (submit, (1024, 1, 256), 1024),
    "4,194,304 tokens in 1,024 prompts": (submit, (1024, 4096, 1), 2**22),
    "4,194,304 tokens in 32 prompts": (submit, (32, 131_072, 1), 2**22),
    f"{MAX_UPDATES:,} updates": (fill_outbox, (MAX_UPDATES, 0), MAX_UPDATES),
    f"{MAX_WITH_LOGPROBS:,} updates with 200 bytes of log-probabilities": (
        fill_outbox,
        (MAX_WITH_LOGPROBS, 200),
        MAX_WITH_LOGPROBS,
    ),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    spawn = multiprocessing.get_context("spawn")
    for name, (measure, arguments, n_units) in CASES.items():
        with spawn.Pool(1) as pool:
            before, after = pool.apply(measure, arguments)
        n_bytes = after - before
        sys.stdout.write(f"{name:>58} {n_bytes / 2**20:8.1f} MiB {n_bytes / n_units:12,.1f} each\n")


if __name__ == "__main__":
    main()
