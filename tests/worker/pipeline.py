"""Runs all stages of a model in one process, plan by plan, with a simple block allocator.

Blocks are given out in a shuffled order, so that no test passes only because blocks happen to be
adjacent. A block whose tokens are outside of all windows is given to another request. Ranks that
share a stage are threads.
"""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import pytest
import torch
from torch import Tensor

from kernels import Ops
from kernels.packing.linear import can_compute
from kernels.pytorch.interpreter import Interpreter
from kernels.weights.linear import Activations, Quantization
from services.common.context_length import context_length
from services.common.pooling import PoolingSetting
from services.common.sampling import SamplingParams
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan
from services.worker.models import StageModel
from services.worker.models.adapters.adapter import Adapter
from services.worker.models.checkpoint import load_stage
from services.worker.models.weight_cache import WeightCache
from services.worker.models.weights import LoadFormat, OnProgress
from tests.limits import HANG_S

T = TypeVar("T")

GREEDY = SamplingParams(temperature=0)

needs_int8 = pytest.mark.skipif(
    not can_compute("int8", torch.device("cpu")), reason="no native library"
)


def load(
    directory: Path,
    *,
    stage_index: int = 0,
    n_stages: int = 1,
    tp_rank: int = 0,
    tp_size: int = 1,
    dtype: str = "auto",
    load_format: LoadFormat = "safetensors",
    quantization: Quantization = "none",
    activations: Activations = "exact",
    max_model_len: int | None = None,
    cache: WeightCache | None = None,
    on_progress: OnProgress = lambda n_done, n_total: None,
    adapters: Sequence[Adapter] = (),
    takes_adapters: bool = False,
    pooling: PoolingSetting = "",
) -> StageModel:
    """Loads a rank's part of a stage, on the CPU. By default, inputs of matrix products are not
    rounded, since oracles do not round them."""
    return load_stage(
        directory,
        stage_index=stage_index,
        n_stages=n_stages,
        tp_rank=tp_rank,
        tp_size=tp_size,
        dtype=dtype,
        load_format=load_format,
        quantization=quantization,
        activations=activations,
        max_model_len=max_model_len,
        cache=cache,
        device=torch.device("cpu"),
        on_progress=on_progress,
        adapters=adapters,
        takes_adapters=takes_adapters,
        pooling=pooling,
    )


class RankGroup:
    """Ranks that share a stage, as threads that meet at a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=HANG_S)
        self._parts: list[tuple[str, Tensor]] = [("", torch.empty(0))] * size
        self._ranks = [ThreadRank(self, rank) for rank in range(size)]
        # Threads are kept from one iteration to the next, since to start them takes as long as to
        # compute one. They end with this object.
        self._threads = ThreadPoolExecutor(size)

    def run(self, work: Callable[["ThreadRank"], T]) -> list[T]:
        """Calls `work` for all ranks at the same time, and returns the result of each."""
        if self.size == 1:
            return [work(self._ranks[0])]
        return list(self._threads.map(lambda rank: self._guarded(work, rank), self._ranks))

    def exchange(self, rank: int, what: str, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors that all ranks pass to this call. All ranks must make the same
        call."""
        self._parts[rank] = what, tensor.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        assert {(name, part.shape) for name, part in parts} == {(what, tensor.shape)}
        return [part for _, part in parts]

    def _guarded(self, work: Callable[["ThreadRank"], T], rank: "ThreadRank") -> T:
        try:
            return work(rank)
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            self._barrier.abort()  # so that the others do not wait for this one
            raise


class ThreadRank:
    """One rank of a `RankGroup`, with the interface that a model needs."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces the tensor by its sum over all ranks."""
        tensor.copy_(torch.stack(self._group.exchange(self.rank, "reduce", tensor)).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, joined along the last dimension in the order of the
        ranks."""
        return torch.cat(self._group.exchange(self.rank, "gather", tensor), -1)


class Stage:
    """The ranks of one stage."""

    def __init__(
        self,
        directory: Path,
        stage_index: int,
        n_stages: int,
        *,
        tp_size: int,
        dtype: str,
        load_format: LoadFormat,
        quantization: Quantization,
        max_model_len: int | None = None,
        cache: WeightCache | None = None,
        n_kv_blocks: int,
        block_size: int,
        interpreted_on: Ops | None = None,
        adapters: Sequence[Adapter] = (),
        max_loaded_adapters: int = 0,
        pooling: PoolingSetting = "",
    ) -> None:
        self._group = RankGroup(tp_size)
        models = self._group.run(
            lambda rank: load(
                directory,
                stage_index=stage_index,
                n_stages=n_stages,
                tp_rank=rank.rank,
                tp_size=tp_size,
                dtype=dtype,
                load_format=load_format,
                quantization=quantization,
                max_model_len=max_model_len,
                cache=cache,
                adapters=adapters,
                takes_adapters=max_loaded_adapters > 0,
                pooling=pooling,
            )
        )
        if interpreted_on is not None:
            for model in models:
                model.runner = Interpreter(model.runner.program, interpreted_on)
        self.windows = models[0].kv_groups.windows
        self._runners = self._group.run(
            lambda rank: ModelRunner(
                models[rank.rank],
                n_kv_blocks=n_kv_blocks * len(self.windows),
                block_size=block_size,
                tensor_parallel=rank,
                max_loaded_adapters=max_loaded_adapters,
            )
        )
        self._is_last = stage_index + 1 == n_stages

    def add_adapter(self, adapter: Adapter, index: int) -> None:
        """Loads an adapter on all ranks."""
        for runner in self._runners:
            assert runner.model.adaptable is not None
            runner.add_adapter(runner.model.adaptable.fit(adapter, index))

    def drop_adapter(self, adapter: Adapter) -> None:
        """Drops an adapter on all ranks."""
        for runner in self._runners:
            runner.drop_adapter(adapter.digest)

    def run(self, plan: IterationPlan, hidden: Tensor | None) -> tuple[Tensor, ...]:
        """Runs a plan and returns the hidden states. The last stage instead returns the sampled
        tokens, the logits, the indices of the spans that have embeddings, and these embeddings. All
        ranks must return the same."""
        first, *others = self._group.run(
            lambda rank: self._run(self._runners[rank.rank], plan, hidden)
        )
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        return first

    def _run(
        self, runner: ModelRunner, plan: IterationPlan, hidden: Tensor | None
    ) -> tuple[Tensor, ...]:
        batch = runner.prepare(plan)
        if not self._is_last:
            return (runner.forward(batch, hidden),)
        logits = runner.logits(batch, hidden)
        values = logits.values.clone()
        sampled = torch.as_tensor(runner.sample(batch, logits))
        vectors = runner.vectors(batch, logits)
        if vectors is None:
            return sampled, values, torch.empty(0), torch.empty(0)
        return sampled, values, torch.tensor(vectors.spans), vectors.values


@dataclass
class Stored:
    """The stored tokens and the blocks of a request."""

    n_stored: int = 0
    n_columns: int = 0
    blocks: list[dict[int, int]] = field(default_factory=list)  # of each group, by column


@dataclass(frozen=True)
class Span:
    """Tokens of one request that run in one iteration."""

    row: int
    token_ids: Sequence[int]
    sample: bool = True
    n_drafts: int = 0


class Pipeline:
    """A pipeline whose stages run one after the other in this process."""

    def __init__(
        self,
        directory: Path,
        *,
        n_stages: int = 1,
        tp_size: int = 1,
        dtype: str = "auto",
        load_format: LoadFormat = "safetensors",
        quantization: Quantization = "none",
        max_model_len: int | Literal["longest"] | None = "longest",
        cache: WeightCache | None = None,
        n_kv_blocks: int = 64,
        block_size: int = 4,
        interpreted_on: Ops | None = None,
        adapters: Sequence[Adapter] = (),
        max_loaded_adapters: int = 0,
        pooling: PoolingSetting = "",
    ) -> None:
        """By default, `max_model_len` is the context that the checkpoint's files state. With None,
        it is the default of a worker. If `interpreted_on` is given, the interpreter runs all
        programs with these operations."""
        if max_model_len == "longest":
            max_model_len = context_length(directory)
        self._stages = [
            Stage(
                directory,
                i,
                n_stages,
                tp_size=tp_size,
                dtype=dtype,
                load_format=load_format,
                quantization=quantization,
                max_model_len=max_model_len,
                cache=cache,
                n_kv_blocks=n_kv_blocks,
                block_size=block_size,
                interpreted_on=interpreted_on,
                adapters=adapters,
                max_loaded_adapters=max_loaded_adapters,
                pooling=pooling,
            )
            for i in range(n_stages)
        ]
        self._block_size = block_size
        self._windows = self._stages[0].windows
        self._free_blocks = list(range(n_kv_blocks * len(self._windows)))
        random.Random(n_kv_blocks).shuffle(self._free_blocks)
        self._sequences: dict[int, Stored] = {}
        self._admissions: list[Admission] = []
        self._released_rows: list[int] = []
        self._iteration = 0
        self.vectors: dict[int, Tensor] = {}
        """Embeddings that iterations have returned, by the rows of their requests."""

    def add_adapter(self, adapter: Adapter, index: int) -> None:
        """Loads an adapter on all stages, between two iterations."""
        for stage in self._stages:
            stage.add_adapter(adapter, index)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Drops an adapter on all stages."""
        for stage in self._stages:
            stage.drop_adapter(adapter)

    def admit(
        self,
        row: int,
        n_prompt_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        adapter: str = "",
        wants_vector: bool = False,
    ) -> None:
        """Adds a request to the next iteration. `adapter` is the digest of its adapter."""
        self._sequences[row] = Stored(blocks=[{} for _ in self._windows])
        self._admissions.append(
            Admission(row, n_prompt_tokens, sampling, adapter=adapter, wants_vector=wants_vector)
        )

    def release(self, row: int) -> None:
        """Releases a request's row and blocks in the next iteration."""
        for blocks in self._sequences.pop(row).blocks:
            self._free_blocks += blocks.values()
        self._released_rows.append(row)

    def forget(self, row: int, n_tokens: int) -> None:
        """Removes the last tokens of a request, which were rejected drafts."""
        self._sequences[row].n_stored -= n_tokens

    def run(self, spans: Sequence[Span]) -> tuple[list[int], Tensor]:
        """Runs one iteration. Returns the sampled tokens, and their logits [n_sampled,
        vocab_size]."""
        plan = self._plan(spans)
        hidden = None
        for stage in self._stages[:-1]:
            (hidden,) = stage.run(plan, hidden)
        sampled, logits, pooled, vectors = self._stages[-1].run(plan, hidden)
        for span, vector in zip(pooled.tolist(), vectors, strict=True):
            self.vectors[spans[span].row] = vector
        return sampled.tolist(), logits

    def _plan(self, spans: Sequence[Span]) -> IterationPlan:
        start_positions = [self._sequences[span.row].n_stored for span in spans]
        for span in spans:
            self._give_back(self._sequences[span.row])
        new_blocks = [self._allocate(span) for span in spans]
        self._iteration += 1
        plan = IterationPlan(
            iteration=self._iteration,
            released_rows=self._released_rows,
            admissions=self._admissions,
            rows=[span.row for span in spans],
            start_positions=start_positions,
            n_tokens=[len(span.token_ids) for span in spans],
            sample=[span.sample for span in spans],
            n_new_blocks=[len(blocks) // len(self._windows) for blocks in new_blocks],
            token_on_rank=[False] * len(spans),
            token_ids=[token for span in spans for token in span.token_ids],
            new_block_ids=[block for blocks in new_blocks for block in blocks],
            n_drafts=[span.n_drafts for span in spans] if any(s.n_drafts for s in spans) else (),
        )
        self._released_rows, self._admissions = [], []
        return plan

    def _allocate(self, span: Span) -> list[int]:
        sequence = self._sequences[span.row]
        sequence.n_stored += len(span.token_ids)
        first, end = sequence.n_columns, -(-sequence.n_stored // self._block_size)
        sequence.n_columns = max(first, end)
        new: list[int] = []
        for blocks in sequence.blocks:
            mine = {column: self._free_blocks.pop() for column in range(first, end)}
            blocks |= mine
            new += mine.values()
        return new

    def _give_back(self, sequence: Stored) -> None:
        """Frees the blocks of a request that are outside of the windows of all later tokens."""
        for window, blocks in zip(self._windows, sequence.blocks, strict=True):
            n_unseen = 0 if window is None else max(0, sequence.n_stored - window + 1)
            for column in [each for each in blocks if each < n_unseen // self._block_size]:
                self._free_blocks.append(blocks.pop(column))
