"""Before requests come, ranks warm up: everything is compiled that iterations need, and decodes are
recorded that are then not recorded any more."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig

from kernels import ops_for
from kernels.forms.sampling_columns import SamplingColumns
from services.worker.engine.decode_graphs import DecodeGraphs, cuda_graphs
from services.worker.engine.warm_up import compile_kernels, record_decodes
from services.worker.models.tensor_parallel import SINGLE, TensorParallel
from tests.checkpoints import SMALL, write_checkpoint, write_family_checkpoint
from tests.kernels.implementations import INTERPRETED, Implementation
from tests.worker.engine.fixed_shapes import OPS, RepeatedCall, load_fixed
from tests.worker.engine.test_decode_graphs import BLOCK_SIZE, MAX_SPANS, Twins
from tests.worker.pipeline import RankGroup

N_SHAPES = 6
"""Recordings of 1, 2, 4, 8, 16 and MAX_SPANS requests; no sequence of the model is long."""


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("new_graph", [None, RepeatedCall], ids=["plain", "recorded"])
def test_all_kinds_of_attention_and_of_sampling_are_run(
    checkpoint: Path, new_graph: Callable[[], RepeatedCall] | None
) -> None:
    planned: set[tuple[bool, str]] = set()
    sampled: set[str] = set()

    def plan_attention(starts: Any, n_tokens: Any, **others: Any) -> Any:
        lengths = "decodes" if n_tokens.max() == 1 else "mixed" if n_tokens.min() == 1 else "spans"
        planned.add((others["has_fixed_shape"], lengths))
        return OPS.plan_attention(starts, n_tokens, **others)

    def sample(logits: Tensor, columns: SamplingColumns) -> Tensor:
        kind = "greedy" if columns.is_greedy else "limited" if columns.any_limited else "drawn"
        sampled.add(kind if columns.penalties is None else f"{kind}, penalised")
        return OPS.sample(logits, columns)

    ops = replace(OPS, plan_attention=plan_attention, sample=sample)
    compile_kernels(
        load_fixed(checkpoint, ops=ops), n_tokens=100, block_size=BLOCK_SIZE, new_graph=new_graph
    )
    assert planned >= {(new_graph is not None, "decodes"), (False, "decodes"), (False, "mixed")}
    assert sampled == {"greedy", "greedy, penalised", "limited", "limited, penalised"}


@pytest.mark.parametrize("stage_index", [0, 1])
def test_every_stage_does_its_share_by_itself(checkpoint: Path, stage_index: int) -> None:
    model = load_fixed(checkpoint, stage_index=stage_index, n_stages=2)
    compile_kernels(model, n_tokens=40, block_size=BLOCK_SIZE, new_graph=RepeatedCall)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_operations_of_a_gpu_are_run(tmp_path: Path, implementation: Implementation) -> None:
    write_checkpoint(tmp_path, num_hidden_layers=1, max_position_embeddings=24)
    model = load_fixed(tmp_path, ops=implementation.ops)
    compile_kernels(model, n_tokens=16, block_size=BLOCK_SIZE, new_graph=RepeatedCall)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.triton
@pytest.mark.timeout(300)
def test_nothing_is_left_to_compile(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **{**SMALL, "num_hidden_layers": 1, "max_position_embeddings": 2048},
        moe_intermediate_size=24,
        num_experts=7,
        num_experts_per_tok=3,
    )
    checkpoint = write_family_checkpoint(tmp_path, config)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.worker.engine.compile_iterations", str(checkpoint)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert {"_attention_kernel", "_combine_kernel", "_sample"} <= set(compiled["warm_up"])
    assert compiled["iterations"] == []


def test_decodes_that_were_recorded_ahead_are_recorded_no_more(checkpoint: Path) -> None:
    twins = Twins(checkpoint, n_stages=2)
    for runner in twins.recorded:
        record_decodes(graphs_of(runner), SINGLE, limit_s=math.inf)
    assert twins.graphs.n_recorded == N_SHAPES
    last = twins.run({row: [row + 1] * (3 + row) for row in range(11)})
    for n in (3, 11, 1, 6, 2):
        last[:n] = twins.run({row: [last[row]] for row in range(n)})
    assert twins.graphs.n_recorded == N_SHAPES


def test_the_largest_comes_first_and_then_the_smallest(checkpoint: Path) -> None:
    graphs = Twins(checkpoint, n_stages=1).graphs
    n_columns = SMALL["max_position_embeddings"] // BLOCK_SIZE
    shapes = [(shape.n_spans, shape.n_columns) for shape in graphs.shapes()]
    assert shapes == [(n, n_columns) for n in (MAX_SPANS, 1, 2, 4, 8, 16)]


def test_shapes_are_all_that_batches_can_have(checkpoint: Path) -> None:
    graphs = Twins(checkpoint, n_stages=1).graphs
    graphs._max_model_len = 5000
    widths = [shape.n_columns for shape in graphs.shapes() if shape.n_spans == 1]
    assert widths == [1024 // BLOCK_SIZE, 2048 // BLOCK_SIZE, 4096 // BLOCK_SIZE, 1250]


@pytest.mark.parametrize(("limit_s", "n_recorded"), [(0, 1), (2.5, 3), (1e9, N_SHAPES)])
def test_recording_ends_when_the_time_is_over(
    checkpoint: Path, limit_s: float, n_recorded: int
) -> None:
    graphs = Twins(checkpoint, n_stages=1).graphs
    record_decodes(graphs, SINGLE, limit_s=limit_s, clock=map(float, count()).__next__)
    assert graphs.n_recorded == n_recorded


def test_ranks_that_record_together_stop_together(checkpoint: Path) -> None:
    def work(rank: TensorParallel) -> int:
        graphs = Twins(checkpoint, n_stages=1).graphs
        clock = map(float, count(step=1 + rank.rank)).__next__
        record_decodes(graphs, rank, limit_s=4, clock=clock)
        return graphs.n_recorded

    assert RankGroup(3).run(work) == [2, 2, 2], "as many as the slowest has time for"


def graphs_of(runner: Any) -> DecodeGraphs:
    graphs: DecodeGraphs | None = runner.graphs
    assert graphs is not None
    return graphs


@pytest.mark.gpu
def test_a_gpu_records_what_it_then_replays(checkpoint: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ops = ops_for(device)
    model = load_fixed(checkpoint, ops=ops, device=device)
    compile_kernels(model, n_tokens=40, block_size=BLOCK_SIZE, new_graph=cuda_graphs())
    twins = Twins(checkpoint, n_stages=1, ops=ops, device=device, new_graph=cuda_graphs())
    record_decodes(twins.graphs, SINGLE, limit_s=math.inf)
    last = twins.run({row: [row + 1] * (3 + 2 * row) for row in range(7)})
    for n in (3, 7, 1):
        last[:n] = twins.run({row: [last[row]] for row in range(n)})
    assert twins.graphs.n_recorded == N_SHAPES
