"""Batches of decodes that are padded and recorded compute what others compute, and touch nothing
that is not theirs. A function that is called again stands in for the recording."""

import gc
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import Ops, ops_for
from kernels.upload import StagedUploads, Uploads
from services.worker.engine.decode_graphs import (
    DecodeGraphs,
    Graph,
    cuda_graphs,
    padded_length,
    padded_size,
)
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan, Spans
from services.worker.models import StageModel
from tests.checkpoints import SMALL, write_checkpoint
from tests.kernels.implementations import INTERPRETED, Implementation
from tests.worker.engine.fixed_shapes import CPU, OPS, RepeatedCall, load_fixed
from tests.worker.pipeline import GREEDY

N_BLOCKS = 80
BLOCK_SIZE = 4
MAX_SPANS = 20


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def make_runner(
    model: StageModel, new_graph: Callable[[], Graph] | None, uploads: Uploads | None
) -> ModelRunner:
    return ModelRunner(
        model,
        n_kv_blocks=N_BLOCKS,
        block_size=BLOCK_SIZE,
        new_graph=new_graph,
        max_graph_batch_size=MAX_SPANS,
        uploads=uploads,
    )


class Twins:
    """Two runners of equal stages, with graphs and without, which are given the same plans."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        n_stages: int,
        ops: Ops = OPS,
        device: torch.device = CPU,
        new_graph: Callable[[], Graph] = RepeatedCall,
    ) -> None:
        models = [
            load_fixed(checkpoint, stage_index=i, n_stages=n_stages, ops=ops, device=device)
            for i in range(n_stages)
        ]
        self.plain = [make_runner(model, None, None) for model in models]
        self.recorded = [
            make_runner(model, new_graph, StagedUploads(device, size=64)) for model in models
        ]
        self.hands_over = n_stages == 1
        self._free = list(range(N_BLOCKS))
        random.Random(0).shuffle(self._free)
        self._n_stored: dict[int, int] = {}
        self._n_blocks: dict[int, int] = {}
        self._iteration = 0

    @property
    def graphs(self) -> DecodeGraphs:
        graphs = self.recorded[-1].graphs
        assert graphs is not None
        return graphs

    def run(self, spans: Mapping[int, Sequence[int]], *, sample: Sequence[bool] = ()) -> list[int]:
        """One iteration of tokens by row, whose results must agree; those that are sampled.

        A span without tokens is one that is on the rank.
        """
        plan = self._plan(spans, sample or [True] * len(spans))
        (plain, logits), (recorded, others) = (
            self._run(stages, plan) for stages in (self.plain, self.recorded)
        )
        assert plain == recorded
        torch.testing.assert_close(others, logits, rtol=1e-4, atol=1e-4)
        self._compare_storage()
        return plain

    def _run(self, stages: list[ModelRunner], plan: IterationPlan) -> tuple[list[int], Tensor]:
        hidden = None
        *others, last = stages
        for stage in others:
            hidden = stage.forward(stage.prepare(plan), hidden)
        batch = last.prepare(plan)
        logits = last.logits(batch, hidden)
        return last.sample(batch, logits).tolist(), logits.values.clone()

    def _compare_storage(self) -> None:
        for plain, recorded in zip(self.plain, self.recorded, strict=True):
            pairs = zip(plain.storage.kv.layers, recorded.storage.kv.layers, strict=True)
            for (keys, values), (other_keys, other_values) in pairs:
                # The last block is for padding, which only recorded decodes have.
                torch.testing.assert_close(other_keys[:-1], keys[:-1], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(other_values[:-1], values[:-1], rtol=1e-4, atol=1e-4)
                assert not keys[-1].any()

    def _plan(self, spans: Mapping[int, Sequence[int]], sample: Sequence[bool]) -> IterationPlan:
        new = [row for row in spans if row not in self._n_stored]
        starts = [self._n_stored.get(row, 0) for row in spans]
        n_tokens = [max(len(tokens), 1) for tokens in spans.values()]
        blocks = []
        for row, start, n in zip(spans, starts, n_tokens, strict=True):
            n_missing = -(-(start + n) // BLOCK_SIZE) - self._n_blocks.get(row, 0)
            blocks.append([self._free.pop() for _ in range(n_missing)])
            self._n_stored[row] = start + n
            self._n_blocks[row] = self._n_blocks.get(row, 0) + n_missing
        self._iteration += 1
        return IterationPlan(
            iteration=self._iteration,
            released_rows=(),
            admissions=[Admission(row, len(spans[row]), GREEDY) for row in new],
            rows=list(spans),
            start_positions=starts,
            n_tokens=n_tokens,
            sample=sample,
            n_new_blocks=[len(ids) for ids in blocks],
            token_on_rank=[not tokens for tokens in spans.values()],
            token_ids=[token for tokens in spans.values() for token in tokens],
            new_block_ids=[block for ids in blocks for block in ids],
        )


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_random_batches_of_decodes_get_what_they_get_without(
    checkpoint: Path, n_stages: int, seed: int
) -> None:
    twins = Twins(checkpoint, n_stages=n_stages)
    chance = random.Random(seed)
    vocabulary = range(SMALL["vocab_size"])
    prompts = {row: chance.choices(vocabulary, k=chance.randint(1, 12)) for row in range(11)}
    last = dict(zip(prompts, twins.run(prompts), strict=True))
    for _ in range(12):
        rows = chance.sample(range(11), chance.randint(1, 11))
        spans = {
            row: [] if twins.hands_over and chance.random() < 0.5 else [last[row]] for row in rows
        }
        last.update(zip(rows, twins.run(spans), strict=True))
    assert 1 < twins.graphs.n_recorded <= 5, "of 1, 2, 4, 8 and 16 requests"


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_operations_of_a_gpu_have_shapes_that_fit_every_batch(
    checkpoint: Path, implementation: Implementation
) -> None:
    twins = Twins(checkpoint, n_stages=1, ops=implementation.ops)
    last = twins.run({row: [row + 1] * (3 + 2 * row) for row in range(3)})
    for n in (3, 2, 3):
        last[:n] = twins.run({row: [last[row]] for row in range(n)})
    assert twins.graphs.n_recorded == 2


@pytest.mark.gpu
def test_recordings_of_a_gpu_get_what_single_launches_get(checkpoint: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ops = ops_for(device)
    twins = Twins(checkpoint, n_stages=1, ops=ops, device=device, new_graph=cuda_graphs())
    last = twins.run({row: [row + 1] * (3 + 2 * row) for row in range(7)})
    for n in (3, 2, 7, 3, 5, 7, 1, 6):
        last[:n] = twins.run({row: [last[row]] if row % 2 else [] for row in range(n)})
    assert twins.graphs.n_recorded == 4


def test_a_graph_is_recorded_once_for_batches_of_a_size(checkpoint: Path) -> None:
    graphs = []

    def new_graph() -> RepeatedCall:
        graphs.append(RepeatedCall())
        return graphs[-1]

    twins = Twins(checkpoint, n_stages=1)
    twins.graphs._new_graph = new_graph
    tokens = twins.run({row: [row] * 3 for row in range(7)})
    for n in (5, 6, 7, 5):
        twins.run({row: [tokens[row]] for row in range(n)})
    assert [graph.n_replays for graph in graphs] == [4]


def test_decodes_that_are_not_all_sampled_have_the_logits_of_those_that_are(
    checkpoint: Path,
) -> None:
    twins = Twins(checkpoint, n_stages=2)
    twins.run({row: [row, 7] for row in range(3)})
    assert len(twins.run({0: [1], 1: [2], 2: [3]}, sample=[True, False, True])) == 2
    assert twins.run({0: [1], 1: [2], 2: [3]}, sample=[False] * 3) == []
    assert twins.graphs.n_recorded == 1


def test_other_batches_go_the_usual_way(checkpoint: Path) -> None:
    twins = Twins(checkpoint, n_stages=1)
    twins.run({row: [row] for row in range(MAX_SPANS + 1)})  # too many
    twins.run({0: [1, 2], 1: [3]})  # one that is no decode
    assert twins.graphs.n_recorded == 0
    twins.run({0: [1], 1: [3]})
    assert twins.graphs.n_recorded == 1


def test_hidden_states_that_were_sent_outlive_the_next_iteration(checkpoint: Path) -> None:
    runner = Twins(checkpoint, n_stages=2).recorded[0]
    sent = []
    for position in range(3):
        plan = IterationPlan(
            iteration=position,
            released_rows=(),
            admissions=() if position else [Admission(0, 1, GREEDY)],
            rows=[0],
            start_positions=[position],
            n_tokens=[1],
            sample=[True],
            n_new_blocks=[0 if position else 1],
            token_on_rank=[False],
            token_ids=[position],
            new_block_ids=() if position else [0],
        )
        sent.append(runner.forward(runner.prepare(plan), None))
        assert sent[-1].shape == (1, SMALL["hidden_size"])
    assert len({tensor.data_ptr() for tensor in sent}) == 3
    assert not torch.equal(sent[0], sent[1])


def test_padding_is_not_computed_from_numbers_that_are_not_finite(checkpoint: Path) -> None:
    twins = Twins(checkpoint, n_stages=2)
    twins.run({row: [row, 7] for row in range(4)})
    last = twins.recorded[-1]
    for n_spans, number in ((4, torch.nan), (3, 0.0)):
        batch = last.prepare(twins._plan({row: [1] for row in range(n_spans)}, [True] * n_spans))
        last.logits(batch, torch.full((n_spans, SMALL["hidden_size"]), number))
    for stored in last.storage.kv.layers:
        assert all(each[-1].isfinite().all() for each in stored), "padding is stored there"


def test_a_batch_must_be_run_before_the_next_one_is_built(checkpoint: Path) -> None:
    twins = Twins(checkpoint, n_stages=1)
    last = twins.run({row: [row] * 3 for row in range(2)})
    runner = twins.recorded[0]
    first = runner.prepare(twins._plan({0: [last[0]]}, [True]))
    runner.prepare(twins._plan({1: [last[1]]}, [True]))
    with pytest.raises(ValueError, match="built last"):
        runner.logits(first, None)


def test_storage_goes_with_the_epoch(checkpoint: Path) -> None:
    twins = Twins(checkpoint, n_stages=1)
    twins.run({0: [1, 2]})
    twins.run({0: [3]})
    storage = weakref.ref(twins.recorded[0].storage.kv)
    gc.disable()
    try:
        twins.recorded.pop().close()
        assert storage() is None
    finally:
        gc.enable()


def spans_of(n_spans: int, *, longest: int, n_tokens: int = 1) -> Spans:
    none = Spans.none()
    starts = np.zeros(n_spans, np.int64)
    starts[-1] = longest - 1
    return Spans(
        rows=np.arange(n_spans),
        start_positions=starts,
        n_tokens=np.full(n_spans, n_tokens),
        sample=np.ones(n_spans, np.bool_),
        token_on_rank=np.ones(n_spans, np.bool_),
        token_ids=none.token_ids,
        new_block_ids=none.new_block_ids,
        next_token_ids=none.next_token_ids,
    )


def test_a_shape_holds_the_batch_and_its_longest_sequence(checkpoint: Path) -> None:
    graphs = Twins(checkpoint, n_stages=1).graphs
    for n_spans in range(1, MAX_SPANS + 1):
        shape = graphs.shape_of(spans_of(n_spans, longest=30))
        assert shape is not None
        assert n_spans <= shape.n_spans <= MAX_SPANS
        assert shape.n_columns == SMALL["max_position_embeddings"] // BLOCK_SIZE
    assert graphs.shape_of(spans_of(MAX_SPANS + 1, longest=30)) is None
    assert graphs.shape_of(spans_of(2, longest=30, n_tokens=2)) is None


def test_sizes_are_few_and_padding_is_little() -> None:
    sizes = sorted({padded_size(n) for n in range(1, 257)})
    assert sizes == [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)]
    assert all(padded_size(n) >= n for n in range(1, 1000))
    assert padded_size(257) == 288


@pytest.mark.parametrize(
    ("n_keys", "expected"),
    [(1, 1024), (1024, 1024), (1025, 2048), (5000, 8192), (40_000, 40_960), (40_960, 40_960)],
)
def test_lengths_are_those_of_the_model_at_most(n_keys: int, expected: int) -> None:
    assert padded_length(n_keys, max_model_len=40_960) == expected


@pytest.mark.gpu
def test_a_recording_computes_from_what_its_tensors_hold() -> None:
    new_graph = cuda_graphs()
    a, b = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    first, second = new_graph(), new_graph()
    first.capture(lambda: b.copy_(a * 2))
    second.capture(lambda: b.add_(1))
    a.fill_(3)
    first.replay()
    second.replay()
    assert b.tolist() == [7.0] * 4
