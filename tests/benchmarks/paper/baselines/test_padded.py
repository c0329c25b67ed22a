"""The baseline without selective batching: what its batches look like, and that padding changes no
token."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper.baselines.padded import PaddedBatchBuilder
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.worker.engine.input_batch import InputBatch
from services.worker.engine.plan import IterationPlan
from services.worker.engine.request_table import RequestTable
from tests.checkpoints import write_checkpoint
from tests.worker.engine.test_input_batch import (
    BLOCK_SIZE,
    FIRST,
    SECOND,
    admit,
    build,
    builder_of,
    make_plan,
    make_table,
)
from tests.worker.engine.test_scheduled_runs import (
    WANTS,
    Rank,
    make_scheduler,
    run_alone,
    serve,
)
from tests.worker.pipeline import GREEDY


def build_padded(plan: IterationPlan, table: RequestTable) -> InputBatch:
    return build(plan, table, builder=PaddedBatchBuilder)


def test_every_span_has_the_length_of_the_longest_and_padding_keeps_off_real_slots() -> None:
    table = make_table()
    build(FIRST, table)
    batch = build_padded(SECOND, table)
    scratch = 39 * BLOCK_SIZE
    assert batch.token_ids.tolist() == [21, 0, 0, 16, 17, 18]
    assert batch.positions.tolist() == [1, 2, 3, 6, 7, 8]
    assert batch.kv[0].slots.tolist() == [21, scratch + 2, scratch + 3, 10, 11, 120]
    assert batch.sampled_tokens.tolist() == [0, 5]


def test_tokens_on_the_rank_are_taken_from_there() -> None:
    table = make_table()
    first = build(FIRST, table)
    table.keep_tokens(first.sampled_rows, np.array([77]))
    plan = replace(
        SECOND,
        rows=(3, 1),
        start_positions=(6, 1),
        n_tokens=(1, 2),
        n_new_blocks=(0, 0),
        token_on_rank=(True, False),
        token_ids=(21, 22),
        new_block_ids=(),
    )
    assert build_padded(plan, table).token_ids.tolist() == [77, 0, 21, 22]


def test_padding_beyond_the_longest_sequence_has_no_positions_beyond_it() -> None:
    table = make_table()
    long = make_plan(
        admissions=(admit(0, 63),),
        rows=(0,),
        start_positions=(0,),
        n_tokens=(63,),
        sample=(True,),
        n_new_blocks=(16,),
        token_ids=(0,) * 63,
        new_block_ids=range(16),
    )
    build(long, table)
    both = make_plan(
        admissions=(admit(1, 3),),
        rows=(0, 1),
        start_positions=(63, 0),
        n_tokens=(1, 3),
        sample=(True, True),
        n_new_blocks=(0, 1),
        token_ids=(9, 1, 2, 3),
        new_block_ids=(20,),
    )
    batch = build_padded(both, table)
    assert batch.positions.tolist() == [63, 63, 63, 0, 1, 2]
    assert batch.kv[0].slots.tolist() == [63, 156, 157, 80, 81, 82]


def test_padding_counts_in_the_tokens_of_a_batch() -> None:
    table = make_table()
    assert builder_of(table).n_tokens([1, 4, 1]) == 6
    assert builder_of(table, builder=PaddedBatchBuilder).n_tokens([1, 4, 1]) == 12


def test_tokens_of_penalised_rows_are_counted_where_they_lie() -> None:
    table = make_table()
    penalised = replace(GREEDY, presence_penalty=1)
    build_padded(replace(FIRST, admissions=(admit(3, 4, penalised), admit(1, 1))), table)
    batch = build_padded(SECOND, table)
    assert batch.counted is not None
    assert batch.counted.generated_tokens.tolist() == [3, 4, 5]
    assert batch.sampling.penalties is not None
    assert batch.sampling.penalties.rows.tolist() == [1]


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(name="alone", scope="module")
def make_alone(checkpoint: Path) -> list[list[int]]:
    return run_alone(checkpoint)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "policy",
    [OrcaPolicy(max_batch_size=4), ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)],
    ids=["orca", "chunked"],
)
def test_padding_changes_no_token(
    checkpoint: Path, alone: list[list[int]], policy: Policy, depth: int
) -> None:
    requests = [want.request(index) for index, want in enumerate(WANTS)]
    rank = Rank(checkpoint, batch_builder=PaddedBatchBuilder)
    n_left_out = serve(rank, make_scheduler(policy, depth=depth), requests)
    assert [list(request.generated_token_ids) for request in requests] == alone
    assert (n_left_out > 0) == (depth > 1)
