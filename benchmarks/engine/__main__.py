"""Runs one batch again and again on one model runner, without a scheduler, as in Fig. 9 of the
paper.

    python -m benchmarks.engine --model DIR [--dtype bfloat16] [--quantization int8] [--threads 2]

Prints for each batch the milliseconds of an iteration, and a lower bound, the floor. The floor is
the larger of two times: reading the weights at the measured bandwidth, and running the linear
layers alone, one after the other, over the same weights. In a model with experts, the floor counts
the largest number of experts that the tokens can choose, each with an even part of the tokens.
Iterations and linear layers run in turns, and medians are compared.

The other columns show the iteration's time by kind of work, by medians too: linear layers,
attention, other operations (norms, rotary embedding with K/V, gates that are not in a linear
layer), sampling, and everything outside kernels (laying out the batch, the Python between calls,
and PyTorch's own work). The time to make a plan is not included. With several stages the first one
is measured, which has the most layers.

`--model` is a directory made by `python -m benchmarks.make_model DIR`, or any checkpoint.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.engine.stopwatch import SHARED, Stopwatch, Use, instrument, seconds_at_once
from kernels.weights.linear import PlainWeight
from services.common.sampling import SamplingParams
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan
from services.worker.models import StageModel
from services.worker.models.checkpoint import load_stage

BLOCK_SIZE = 16
N_WARM_UPS = 3
BANDWIDTH_BYTES = 1 << 29
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of `n_decodes` requests that decode at a given context and, if `n_prompt_tokens` is
    not 0, one prompt of that many tokens."""

    name: str
    n_decodes: int
    n_prompt_tokens: int


CASES = [
    *(Case(f"decode {n}", n, 0) for n in (1, 8, 16, 32)),
    *(Case(f"prefill {n}", 0, n) for n in (128, 512)),
    Case("mixed 480+32", 32, 480),
]


class Batch:
    """A batch on a new runner that has already stored the context of all decodes. The batch can be
    run any number of times."""

    def __init__(self, model: StageModel, case: Case, context: int, n_iterations: int) -> None:
        self.case = case
        self._model = model
        n_positions = max(context + n_iterations, case.n_prompt_tokens)
        self._n_blocks = -(-n_positions // BLOCK_SIZE)  # blocks of a request in one K/V group
        self._n_own = self._n_blocks * len(
            model.kv_groups.windows
        )  # blocks of a request in all K/V groups
        n_rows = case.n_decodes + (case.n_prompt_tokens > 0)
        self._runner = ModelRunner(model, n_kv_blocks=n_rows * self._n_own, block_size=BLOCK_SIZE)
        self._iteration = 0
        self._position = context
        for row in range(case.n_decodes):
            self.run(self._plan([(row, 0, context)], admitted=[row]))

    def next_plan(self) -> IterationPlan:
        """Returns the plan that the engine master would send for the next iteration."""
        spans = [(row, self._position, 1) for row in range(self.case.n_decodes)]
        self._position += 1
        if not self.case.n_prompt_tokens:
            return self._plan(spans)
        row = self.case.n_decodes
        is_again = self._iteration > self.case.n_decodes
        return self._plan(
            [*spans, (row, 0, self.case.n_prompt_tokens)],
            admitted=[row],
            released=[row] if is_again else [],
        )

    def run(self, plan: IterationPlan) -> None:
        """Runs the iteration of `plan`."""
        batch = self._runner.prepare(plan)
        if self._model.is_last:
            self._runner.sample(batch, self._runner.logits(batch, None)).tolist()
        else:
            self._runner.forward(batch, None)

    def _plan(
        self,
        spans: Sequence[tuple[int, int, int]],  # row, start position, tokens
        *,
        admitted: Sequence[int] = (),
        released: Sequence[int] = (),
    ) -> IterationPlan:
        rows, starts, lengths = zip(*spans, strict=True)
        n_new = [self._n_blocks if row in admitted else 0 for row in rows]
        plan = IterationPlan(
            iteration=self._iteration,
            released_rows=released,
            admissions=[Admission(row, 1, GREEDY) for row in admitted],
            rows=rows,
            start_positions=starts,
            n_tokens=lengths,
            sample=[True] * len(spans),
            n_new_blocks=n_new,
            token_ids=[1 + i % 1000 for i in range(sum(lengths))],
            new_block_ids=[
                block
                for row in admitted
                for block in range(row * self._n_own, (row + 1) * self._n_own)
            ],
            token_on_rank=[False] * len(spans),
        )
        self._iteration += 1
        return plan


def bandwidth() -> float:
    """Returns the bandwidth of reading memory, in bytes per second. This is the better result of
    two measurements: the sum of a large array, and matrix products with one token."""
    numbers = torch.ones(BANDWIDTH_BYTES // 4)
    size = 1 << 12
    matrices = [PlainWeight(torch.ones(size, size)) for _ in range(4)]
    x = torch.ones(1, size)

    def multiply() -> None:
        for matrix in matrices:
            matrix(x)

    n_bytes = sum(matrix.nbytes for matrix in matrices)
    return max(numbers.nbytes / best_of(lambda: numbers.sum()), n_bytes / best_of(multiply))


def best_of(work: Callable[[], object], n: int = 5) -> float:
    """Calls `work` `n` times and returns the seconds of the fastest call."""
    return min(seconds_of(work) for _ in range(n))


def seconds_of(work: Callable[..., object], *arguments: object) -> float:
    """Calls `work` with `arguments` once and returns the seconds that the call took."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def calls_of(model: StageModel, uses: Sequence[Use], case: Case) -> list[tuple[Any, int]]:
    """Returns each weight that a batch uses, with the number of tokens that are multiplied by the
    weight."""
    n_tokens = case.n_decodes + case.n_prompt_tokens
    n_sampled = case.n_decodes + (case.n_prompt_tokens > 0)
    *layers, last = uses
    calls = [(use.weight, use.choice.n_tokens(n_tokens)) for use in layers]
    calls.append((last.weight, n_sampled if model.is_last else n_tokens))
    return [(weight, n) for weight, n in calls if n]


def linears_alone(model: StageModel, calls: Sequence[tuple[Any, int]]) -> Callable[[], None]:
    """Returns a function that runs the matrix products of `calls`, one after the other, on random
    inputs."""
    inputs = {
        shape: torch.randn(shape).to(model.dtype)
        for shape in {(n, weight.shape[1]) for weight, n in calls}
    }

    def multiply() -> None:
        for weight, n in calls:
            weight(inputs[n, weight.shape[1]])

    return multiply


@dataclass(frozen=True, slots=True)
class Line:
    """The results of one batch. Times are in milliseconds."""

    case: Case
    iteration: float
    floor: float
    shares: dict[
        str, float
    ]  # medians of the shares of the time, by kind; the sum may differ from 1


def measure(
    model: StageModel,
    uses: Sequence[Use],
    watch: Stopwatch,
    case: Case,
    *,
    context: int,
    n_iterations: int,
    rate: float,
) -> Line:
    """Measures one batch over `n_iterations` iterations; `rate` is the memory bandwidth in bytes
    per second."""
    calls = calls_of(model, uses, case)
    n_bytes = sum(weight.nbytes for weight, _ in calls)
    multiply = linears_alone(model, calls)
    batch = Batch(model, case, context, n_iterations + N_WARM_UPS)
    for _ in range(N_WARM_UPS):
        batch.run(batch.next_plan())
        multiply()
    times, alone, outside = [], [], []
    spent: dict[str, list[float]] = {kind: [] for kind in SHARED}
    for _ in range(n_iterations):
        alone.append(seconds_of(multiply))
        plan = batch.next_plan()
        watch.seconds.clear()
        before = seconds_at_once(model)
        times.append(seconds_of(batch.run, plan))
        after = seconds_at_once(model)
        for kind in SHARED:
            at_once = after.get(kind, 0.0) - before.get(kind, 0.0)
            spent[kind].append(watch.seconds.get(kind, 0.0) + at_once)
        outside.append(times[-1] - sum(seconds[-1] for seconds in spent.values()))
    floor = max(n_bytes / rate, statistics.median(alone))
    iteration = statistics.median(times)
    spent["outside"] = outside
    shares = {kind: statistics.median(seconds) / iteration for kind, seconds in spent.items()}
    return Line(case, 1e3 * iteration, 1e3 * floor, shares)


def print_table(lines: Sequence[Line]) -> None:
    """Prints a table with one line for each batch."""
    kinds = (*SHARED, "outside")
    print(f"{'batch':<14}{'ms':>8}{'floor':>8}{'ratio':>7}", *(f"{kind:>10}" for kind in kinds))
    for line in lines:
        print(
            f"{line.case.name:<14}{line.iteration:>8.2f}{line.floor:>8.2f}"
            f"{line.iteration / line.floor:>7.2f}",
            *(f"{line.shares.get(kind, 0):>10.1%}" for kind in kinds),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument(
        "--context", type=int, default=48, help="tokens; the paper has 32 or 128 and those it adds"
    )
    parser.add_argument("--iterations", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_stage(
        arguments.model,
        stage_index=0,
        n_stages=arguments.stages,
        tp_rank=0,
        tp_size=1,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        device=torch.device("cpu"),
        on_progress=lambda n_done, n_total: None,
    )
    watch = Stopwatch()
    uses = instrument(model, watch)
    rate = bandwidth()
    print(f"{arguments.threads} threads, reading {rate / 1e9:.1f} GB/s")
    with torch.inference_mode():
        lines = [
            measure(
                model,
                uses,
                watch,
                case,
                context=arguments.context,
                n_iterations=arguments.iterations,
                rate=rate,
            )
            for case in tqdm(CASES, leave=False)
        ]
    print_table(lines)


if __name__ == "__main__":
    main()
