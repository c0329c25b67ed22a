"""A model of random weights on a runner, and plans for the runner: the work of a rank, without its
processes.

`Steps` takes the place of a scheduler where one batch runs again and again: it keeps track of the
admitted rows and of the number of their stored tokens. To bring requests to a context, their tokens
are planned but not computed, since the K/V blocks hold random numbers anyway.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.bench import EAGER, GRAPHS, Bench
from benchmarks.gpu.shapes import BLOCK_SIZE
from benchmarks.gpu.timing import device_event
from kernels.weights.linear import Quantization
from services.common.sampling import SamplingParams
from services.worker.engine.decode_graphs import cuda_graphs
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan
from services.worker.models import StageModel, random_stage

GREEDY = SamplingParams(temperature=0)
MAX_GRAPH_BATCH_SIZE = 256
SPARE_BYTES = 6 << 30
"""Bytes of device memory that are left free for activations, logits and CUDA graphs."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one iteration, in seconds."""

    prepare_s: float
    """Seconds in which the host makes the batch from the plan."""
    launch_s: float
    """Seconds in which the host queues all kernels of the iteration, after the batch is made."""
    wait_s: float
    """Seconds that `wait` blocks until the tokens are on the host."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole iteration, if it does not overlap with other iterations."""
        return self.prepare_s + self.launch_s + self.wait_s


class Launched:
    """An iteration that was launched, and whose sampled tokens are being copied to the host."""

    def __init__(self, runner: ModelRunner, plan: IterationPlan) -> None:
        start = time.perf_counter()
        batch = runner.prepare(plan)
        prepared = time.perf_counter()
        tokens = runner.sample(batch, runner.logits(batch, None))
        self._tokens, self._arrived = tokens, None
        if not isinstance(tokens, torch.Tensor):
            self._tokens = tokens.copy()  # the next iteration overwrites them
        else:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._arrived = device_event()
            self._arrived.record()
        self._prepare_s = prepared - start
        self._launch_s = time.perf_counter() - prepared

    def wait(self) -> tuple[list[int], StepTimes]:
        """Waits for the sampled tokens; returns the tokens and the times of the iteration."""
        start = time.perf_counter()
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids: list[int] = self._tokens.tolist()
        wait_s = time.perf_counter() - start
        return token_ids, StepTimes(self._prepare_s, self._launch_s, wait_s)


def random_model(bench: Bench, quantization: Quantization = "none") -> StageModel:
    """Returns the benchmark's model as a single stage, with random weights."""
    config = bench.scale.model.llama_config()
    return random_stage(config, dtype=bench.dtype, device=bench.device, quantization=quantization)


def n_kv_blocks(bench: Bench, limit: int) -> int:
    """Returns the number of K/V blocks that fit into the free memory, at most `limit`."""
    shape = bench.scale.model
    block_bytes = shape.n_kv_elements * bench.dtype.itemsize * BLOCK_SIZE
    room = bench.scale.kv_bytes or bench.free_bytes() - SPARE_BYTES
    return min(limit, max(0, room // block_bytes))


def runner_of(model: StageModel, n_blocks: int, *, has_graphs: bool) -> ModelRunner:
    """Returns a runner whose K/V storage holds random numbers, the same in every call. With
    `has_graphs`, which needs a GPU, the runner uses CUDA graphs."""
    runner = ModelRunner(
        model,
        n_kv_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        new_graph=cuda_graphs() if has_graphs else None,
        max_graph_batch_size=MAX_GRAPH_BATCH_SIZE,
    )
    generator = torch.Generator(model.device).manual_seed(0)
    for layer in runner.storage.kv.layers:
        for storage in layer:
            storage[:n_blocks].normal_(generator=generator)  # a block for padding may follow
    return runner


def versions_of(bench: Bench) -> tuple[str, ...]:
    """Returns the names of the versions of the runner on this device: with and without CUDA graphs
    on a GPU, only without on a CPU."""
    return (GRAPHS, EAGER) if bench.device.type == "cuda" else (EAGER,)


class Steps:
    """Iterations of requests with equal lengths on one runner."""

    def __init__(self, runner: ModelRunner, *, n_blocks: int) -> None:
        self._runner = runner
        self._n_blocks = n_blocks
        self._iteration = 0
        self._rows: list[int] = []
        self._n_stored = 0
        self._released: list[int] = []

    def admit(self, n_requests: int, *, context: int, n_more: int) -> bool:
        """Ends all present requests and begins `n_requests` new ones, each with `context` stored
        tokens and memory for `n_more` further tokens. If there is not enough memory, no request
        begins and False is returned."""
        self._released += self._rows
        self._rows = []
        n_own = -(-(context + n_more) // BLOCK_SIZE)
        if n_own * n_requests > self._n_blocks:
            return False
        for row in range(n_requests):
            plan = self._plan(
                [row],
                start=0,
                n_tokens=context,
                new_blocks=range(row * n_own, (row + 1) * n_own),
            )
            self._runner.prepare(plan)  # and not computed
        self._rows = list(range(n_requests))
        self._n_stored = context
        return True

    def decode(self) -> Launched:
        """Launches an iteration that computes the next token of each request. The input is the
        token sampled before, which stays on the rank."""
        plan = self._plan(self._rows, start=self._n_stored, n_tokens=1)
        self._n_stored += 1
        return Launched(self._runner, plan)

    def prefill(self, n_tokens: int) -> Launched:
        """Ends all present requests, and launches the prompt of a new one."""
        n_own = -(-n_tokens // BLOCK_SIZE)
        self._released += self._rows
        self._rows = [0]
        plan = self._plan([0], start=0, n_tokens=n_tokens, new_blocks=range(n_own))
        return Launched(self._runner, plan)

    def _plan(
        self, rows: Sequence[int], *, start: int, n_tokens: int, new_blocks: Sequence[int] = ()
    ) -> IterationPlan:
        is_new = start == 0
        released, self._released = self._released, []
        self._iteration += 1
        return IterationPlan(
            iteration=self._iteration,
            released_rows=released,
            admissions=[Admission(row, 1, GREEDY) for row in rows] if is_new else [],
            rows=rows,
            start_positions=[start] * len(rows),
            n_tokens=[n_tokens] * len(rows),
            sample=[True] * len(rows),
            n_new_blocks=[len(new_blocks)] if is_new else [0] * len(rows),
            token_on_rank=[not is_new] * len(rows),
            token_ids=[1 + i % 97 for i in range(n_tokens)] if is_new else [],
            new_block_ids=new_blocks,
        )
