"""Layers that keep a state of each request: how much memory they take, and whose state is whose."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3_5TextConfig

from services.common.cannot_start import CannotStart
from services.common.protocol import MAX_KV_BLOCKS
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan, PlanError
from services.worker.engine.recurrent_state import (
    MAX_STATE_ROWS,
    Division,
    RecurrentState,
    divide,
    state_bytes,
)
from services.worker.models.config_file import read_config
from services.worker.rank.stage_shard import StageShard
from tests.checkpoints import SMALL, write_family_checkpoint
from tests.scheduler.core.workload import build
from tests.worker.engine.test_scheduled_runs import WANTS, Rank, make_scheduler, run_alone, serve
from tests.worker.pipeline import GREEDY, Pipeline, Span, load
from tests.worker.rank.test_started_rank import settings_of

N_HEADS, KEY_DIM, VALUE_DIM, N_INPUTS = 4, 10, 14, 3
CONFIG = Qwen3_5TextConfig(
    **{**SMALL, "num_hidden_layers": 4},
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=N_HEADS,
    linear_key_head_dim=KEY_DIM,
    linear_value_head_dim=VALUE_DIM,
)
N_CHANNELS = 2 * 2 * KEY_DIM + N_HEADS * VALUE_DIM


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family_checkpoint(tmp_path_factory.mktemp("checkpoint"), CONFIG)


@pytest.fixture(name="alone", scope="module")
def make_alone(checkpoint: Path) -> list[list[int]]:
    return run_alone(checkpoint)


class TestMemory:
    @pytest.mark.parametrize("tp_size", [1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_takes_as_many_bytes_as_promised(
        self, checkpoint: Path, dtype: torch.dtype, tp_size: int
    ) -> None:
        config, layers = read_config(checkpoint), range(1, 4)
        states = RecurrentState(
            config, layers, n_rows=6, dtype=dtype, device=torch.device("cpu"), tp_size=tp_size
        )
        stored = [layer for layer in states.layers if layer is not None]
        assert [layer is None for layer in states.layers] == [False, False, True]
        allocated = sum(tensor.nbytes for layer in stored for tensor in layer)
        promised = state_bytes(config, layers, dtype=dtype, tp_size=tp_size)
        elements = 4 * N_HEADS * KEY_DIM * VALUE_DIM + dtype.itemsize * N_INPUTS * N_CHANNELS
        assert allocated == 7 * promised == 7 * 2 * elements // tp_size

    def test_padding_and_rows_without_states_have_the_last_place(self, checkpoint: Path) -> None:
        def states(n_rows: int) -> RecurrentState:
            return RecurrentState(
                read_config(checkpoint),
                range(4),
                n_rows=n_rows,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )

        assert states(3).places(np.array([2, 0]), 4).tolist() == [2, 0, 3, 3]
        assert states(0).places(np.array([2, 0]), 2).tolist() == [0, 0]

    @pytest.mark.parametrize(
        ("memory", "sizes", "expected"),
        [
            (1000, {"block_bytes": 10, "row_bytes": 0}, Division(100, 0)),
            (1000, {"block_bytes": 10, "row_bytes": 50}, Division(50, 9)),
            (1000, {"block_bytes": 10, "row_bytes": 400}, Division(20, 1)),
            (10**6, {"block_bytes": 10, "row_bytes": 1}, Division(99_974, MAX_STATE_ROWS)),
            (1000, {"block_bytes": 0, "row_bytes": 50}, Division(MAX_KV_BLOCKS, 19)),
        ],
        ids=["no states", "half of it", "one request", "small states", "no blocks"],
    )
    def test_is_divided_between_blocks_and_states(
        self, memory: int, sizes: dict[str, int], expected: Division
    ) -> None:
        assert divide(memory, block_size=16, **sizes) == expected

    @pytest.mark.parametrize(
        ("memory", "sizes", "figures"),
        [
            (9, {"block_bytes": 10, "row_bytes": 0}, "9 bytes are less than .*, 10 bytes$"),
            (209, {"block_bytes": 10, "row_bytes": 100}, "10 bytes, and 200 for the states"),
            (199, {"block_bytes": 0, "row_bytes": 100}, "0 bytes, and 200 for the states"),
        ],
        ids=["block", "block and state", "state"],
    )
    def test_that_is_too_small_is_refused_with_figures(
        self, memory: int, sizes: dict[str, int], figures: str
    ) -> None:
        with pytest.raises(CannotStart, match=figures):
            divide(memory, block_size=16, **sizes)


@pytest.mark.parametrize("stage_index", [0, 3])
def test_a_stage_says_for_how_many_requests_it_has_states(
    checkpoint: Path, stage_index: int
) -> None:
    settings = settings_of(checkpoint, kv_memory=100_000, n_stages=4, stage_index=stage_index)
    shard = StageShard(settings, load(checkpoint, stage_index=stage_index, n_stages=4))
    said = shard.describe(rendezvous_address="")
    n_bytes = 4 * (N_HEADS * KEY_DIM * VALUE_DIM + N_INPUTS * N_CHANNELS)
    if stage_index == 0:
        assert (said.n_kv_blocks, said.n_state_rows) == (MAX_KV_BLOCKS, 100_000 // n_bytes - 1)
    else:
        slots = settings.block_size * 2 * 2 * 24 * 4
        assert (said.n_kv_blocks, said.n_state_rows) == (100_000 // slots, 0)


class TestRefusals:
    """Plans that would need a state that is not there."""

    def refused(self, checkpoint: Path, plan: IterationPlan, *, n_rows: int = 4) -> str:
        runner = ModelRunner(load(checkpoint), n_kv_blocks=8, block_size=4, n_state_rows=n_rows)
        with pytest.raises(PlanError) as error:
            runner.prepare(plan)
        return str(error.value)

    def test_of_stored_tokens(self, checkpoint: Path) -> None:
        admission = Admission(0, 6, GREEDY, stored_token_ids=[1, 2, 3, 4])
        plan = replace(self.plan(), admissions=[admission], start_positions=[4])
        assert "no state after them" in self.refused(checkpoint, plan)

    def test_of_drafts(self, checkpoint: Path) -> None:
        plan = replace(self.plan(), n_drafts=[1])
        assert "cannot take back" in self.refused(checkpoint, plan)

    def test_of_rows_without_states(self, checkpoint: Path) -> None:
        plan = replace(self.plan(), admissions=[Admission(4, 2, GREEDY)], rows=[4])
        assert "row 4 is not below 4" in self.refused(checkpoint, plan)

    def plan(self) -> IterationPlan:
        return IterationPlan(
            iteration=1,
            released_rows=(),
            admissions=[Admission(0, 2, GREEDY)],
            rows=[0],
            start_positions=[0],
            n_tokens=[2],
            sample=[True],
            n_new_blocks=[2],
            token_on_rank=[False],
            token_ids=[5, 6],
            new_block_ids=[0, 1],
        )


@pytest.mark.parametrize("n_stages", [1, 4])
def test_a_row_that_is_given_away_begins_anew(checkpoint: Path, n_stages: int) -> None:
    first, second = [5, 6, 7, 8, 9], [9, 1]
    alone = Pipeline(checkpoint, n_stages=n_stages)
    alone.admit(0, len(second))
    _, expected = alone.run([Span(0, second)])
    used = Pipeline(checkpoint, n_stages=n_stages)
    used.admit(0, len(first))
    used.run([Span(0, first)])
    used.release(0)
    used.admit(0, len(second))
    _, logits = used.run([Span(0, second)])
    assert torch.equal(logits, expected)


POLICIES = pytest.mark.parametrize(
    "policy",
    [OrcaPolicy(max_batch_size=4), ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)],
    ids=["orca", "chunked"],
)


def generated(requests: list[Any]) -> list[list[int]]:
    return [list(request.generated_token_ids) for request in requests]


@POLICIES
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_do_not_depend_on_policy_or_depth(
    checkpoint: Path, alone: list[list[int]], policy: Policy, depth: int
) -> None:
    requests = [want.request(index) for index, want in enumerate(WANTS)]
    serve(Rank(checkpoint), make_scheduler(policy, depth=depth), requests)
    assert generated(requests) == alone


def test_who_stops_while_its_next_token_is_computed_leaves_a_dead_row(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    # The third token of each is its stop token; by then the next one changes its state.
    stops = [frozenset(tokens[2:3]) for tokens in alone]
    requests = [want.request(i, stops[i]) for i, want in enumerate(WANTS)]
    policy = ChunkedPolicy(max_batch_size=2, max_batch_tokens=9)
    serve(Rank(checkpoint), make_scheduler(policy, depth=2), requests)
    for want, request, tokens, stop in zip(WANTS, requests, alone, stops, strict=True):
        if not want.min_tokens:
            end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
            assert list(request.generated_token_ids) == tokens[: end + 1]


@POLICIES
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_do_not_depend_on_who_was_preempted(
    checkpoint: Path, alone: list[list[int]], policy: Policy, depth: int
) -> None:
    use = ExpectedUse()
    use.share = 0.0
    scheduler = build(
        max_batch_size=4,
        n_blocks=9,
        block_size=4,
        pipeline_depth=depth,
        token_hand_off=True,
        policy=policy,
        expected_use=use,
    )
    requests = [want.request(index) for index, want in enumerate(WANTS)]
    serve(Rank(checkpoint), scheduler, requests)
    assert generated(requests) == alone
    assert sum(request.n_preemptions for request in requests) > 0


def test_the_next_epoch_goes_on_from_the_tokens_that_there_are(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    pool = RequestPool(max_requests=len(WANTS))
    requests = [want.request(index) for index, want in enumerate(WANTS)]
    policy = ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)

    def epoch() -> tuple[Scheduler, Rank]:
        made = make_scheduler(policy, depth=2)
        return Scheduler(pool, made.kv_manager, policy=policy, pipeline_depth=2), Rank(checkpoint)

    scheduler, rank = epoch()
    for request in requests:
        scheduler.submit(request)
    n_iterations = 0
    in_flight: list[tuple[int, list[int]]] = []
    while len(pool):
        while (batch := scheduler.select()) is not None:
            in_flight.append((batch.iteration, rank.run(batch)))
        n_iterations += 1
        if n_iterations % 7:
            scheduler.apply(*in_flight.pop(0))
            continue
        _, ends = scheduler.suspend()  # what is in flight is lost
        assert ends == []
        in_flight.clear()
        scheduler, rank = epoch()
        assert scheduler.adopt() == []
    assert n_iterations > 20
    assert generated(requests) == alone


def test_decodes_that_are_recorded_have_their_rows_states(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    requests = [want.request(index) for index, want in enumerate(WANTS)]
    policy = ChunkedPolicy(max_batch_size=4, max_batch_tokens=7)
    serve(Rank(checkpoint, has_graphs=True), make_scheduler(policy, depth=2), requests)
    assert generated(requests) == alone
