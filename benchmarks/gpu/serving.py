"""A whole workload through the scheduling core and the runner of a rank, in one process.

All requests arrive at the start, with the paper's mixed lengths (`benchmarks.workload`). Chunked
iteration-level scheduling, K/V accounting and the runner are the deployed ones; there are no other
processes, no gRPC and no text. As in a deployment, the next iteration is launched before the
previous one has returned, and sampled tokens stay on the rank as inputs of the next iteration.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks import workload
from benchmarks.gpu.bench import GRAPHS, Bench, progress
from benchmarks.gpu.runners import (
    GREEDY,
    Launched,
    StepTimes,
    n_kv_blocks,
    random_model,
    runner_of,
    versions_of,
)
from benchmarks.gpu.shapes import BLOCK_SIZE
from benchmarks.workload import PlannedRequest
from services.scheduler.core.batch import Batch
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan

MAX_BATCH_SIZE = 64
MAX_BATCH_TOKENS = 2048
PIPELINE_DEPTH = 2


@torch.inference_mode()  # as a rank does
def measure(bench: Bench) -> None:
    """Runs the workload on each version and writes a row for each. The second run on a runner
    counts, because CUDA graphs are recorded in the first."""
    requests = requests_of(bench)
    n_tokens = sum(request.n_prompt + request.n_output for request in requests)
    model = random_model(bench)
    n_blocks = n_kv_blocks(bench, n_tokens // BLOCK_SIZE + len(requests))
    for version in versions_of(bench):
        if bench.is_over:
            bench.skip(f"{len(requests)} requests", bench.OUT_OF_TIME)
            return
        runner = runner_of(model, n_blocks, has_graphs=version == GRAPHS)
        scheduler = scheduler_of(n_blocks, max_requests=len(requests))
        first = serve(scheduler, runner, requests, name="first")
        progress(f"  {len(requests)} requests in {first.seconds:.2f} s")
        run_again = serve(scheduler, runner, requests, name="again")
        del runner
        bench.release()
        steps = run_again.steps
        bench.emit(
            {
                "case": f"{len(requests)} requests, all at once",
                "version": version,
                "seconds": run_again.seconds,
                "first_run_s": first.seconds,
                "n_iterations": len(steps),
                "n_prompt_tokens": sum(request.n_prompt for request in requests),
                "n_output_tokens": run_again.n_output,
                "output_tokens_per_s": run_again.n_output / run_again.seconds,
                "prepare_s": sum(step.prepare_s for step in steps),
                "launch_s": sum(step.launch_s for step in steps),
                "wait_s": sum(step.wait_s for step in steps),
                "scheduling_s": run_again.seconds - sum(step.total_s for step in steps),
                "max_batch_size": MAX_BATCH_SIZE,
                "max_batch_tokens": MAX_BATCH_TOKENS,
                "pipeline_depth": PIPELINE_DEPTH,
            }
        )


def requests_of(bench: Bench) -> list[PlannedRequest]:
    """Returns the requests of the workload, which are the same for every version."""
    scale = bench.scale
    lengths = workload.mixed_lengths(
        scale.n_requests, seed=0, prompts=scale.prompt_tokens, outputs=scale.output_tokens
    )
    arrivals_s = workload.all_at_once(len(lengths))
    return workload.plan(lengths, arrivals_s, vocab_size=scale.model.vocab_size, seed=0)


@dataclass(slots=True)
class Run:
    """One run of the workload: its seconds, its output tokens, and the times of its iterations."""

    seconds: float = 0.0
    n_output: int = 0
    steps: list[StepTimes] = field(default_factory=list)


def scheduler_of(n_blocks: int, *, max_requests: int) -> Scheduler:
    """Returns a scheduler with the same settings as in a deployment."""
    return Scheduler(
        RequestPool(max_requests=max_requests),
        KVManager(n_blocks=n_blocks, block_size=BLOCK_SIZE),
        policy=ChunkedPolicy(max_batch_size=MAX_BATCH_SIZE, max_batch_tokens=MAX_BATCH_TOKENS),
        pipeline_depth=PIPELINE_DEPTH,
        token_hand_off=True,
    )


def serve(
    scheduler: Scheduler, runner: ModelRunner, requests: Sequence[PlannedRequest], *, name: str
) -> Run:
    """Runs iterations until all requests are complete. `name` is a prefix of the request ids, so
    that the ids of different runs differ."""
    for index, request in enumerate(requests):
        scheduler.submit(
            Request(
                RequestId(f"{name}-{index}"),
                list(request.prompt_token_ids),
                max_new_tokens=request.n_output,
            )
        )
    outcome = Run()
    start = time.perf_counter()
    under_way: deque[tuple[int, Launched]] = deque()
    while True:
        while (batch := scheduler.select()) is not None:
            under_way.append((batch.iteration, Launched(runner, plan_of(batch))))
        if not under_way:
            break
        iteration, launched = under_way.popleft()
        token_ids, times = launched.wait()
        outcome.steps.append(times)
        outcome.n_output += len(scheduler.apply(iteration, token_ids))
    outcome.seconds = time.perf_counter() - start
    return outcome


def plan_of(batch: Batch) -> IterationPlan:
    """Converts a batch of the scheduler into the plan that the rank runs, without the wire format
    in between."""
    spans = batch.spans
    rows = [_row_of(span.request) for span in spans]
    return IterationPlan(
        iteration=batch.iteration,
        released_rows=batch.released_rows,
        admissions=[
            Admission(row, span.request.n_prompt_tokens, GREEDY)
            for row, span in zip(rows, spans, strict=True)
            if span.is_admission
        ],
        rows=rows,
        start_positions=[span.start_position for span in spans],
        n_tokens=[span.n_tokens for span in spans],
        sample=[span.is_sampled for span in spans],
        n_new_blocks=[len(span.new_block_ids) for span in spans],
        token_on_rank=[not span.token_ids for span in spans],
        token_ids=[token_id for span in spans for token_id in span.token_ids],
        new_block_ids=[block_id for span in spans for block_id in span.new_block_ids],
    )


def _row_of(request: Request) -> int:
    if request.reservation is None:
        raise RuntimeError(f"request {request.request_id} is in a batch without memory")
    return request.reservation.row
