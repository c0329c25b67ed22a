"""Log-probabilities of prompts in pieces and of sampled tokens, against `transformers`."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orcinus.v1 import logprobs_pb2, worker_pb2

from services.common.sampling import SamplingParams
from services.worker.engine.logprobs import (
    ROWS_AT_ONCE,
    BatchLogprobs,
    LogprobColumns,
    LogprobSpan,
    ReportedSpan,
)
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan, PlanError
from services.worker.rank import wire
from tests.checkpoints import SMALL, Oracle, write_checkpoint
from tests.worker.pipeline import load

VOCAB_SIZE = SMALL["vocab_size"]
BLOCK_SIZE = 4
N_BLOCKS = 64
TOLERANCE = 1e-4

BIASED = SamplingParams(temperature=1.5, seed=5, repetition_penalty=1.5, logit_bias=((7, 30.0),))


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(name="oracle", scope="module")
def make_oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


class Stages:
    """Chained stages, each request with blocks of its own from the start."""

    def __init__(self, checkpoint: Path, n_stages: int) -> None:
        self._runners = [
            ModelRunner(
                load(checkpoint, stage_index=index, n_stages=n_stages),
                n_kv_blocks=2 * N_BLOCKS,
                block_size=BLOCK_SIZE,
            )
            for index in range(n_stages)
        ]
        self._n_run = 0

    def run(
        self, spans: Sequence[tuple[Admission, int, Sequence[int], bool]], next_tokens: list[int]
    ) -> tuple[list[int], list[ReportedSpan]]:
        """Runs spans of requests: each with its start, its tokens and whether a token is sampled;
        returns the sampled tokens and the log-probabilities."""
        self._n_run += 1
        fresh = [admission for admission, start, _, _ in spans if start == 0]
        plan = IterationPlan(
            iteration=self._n_run,
            released_rows=(),
            admissions=fresh,
            rows=[admission.row for admission, *_ in spans],
            start_positions=[start for _, start, _, _ in spans],
            n_tokens=[len(tokens) for _, _, tokens, _ in spans],
            sample=[is_sampled for *_, is_sampled in spans],
            n_new_blocks=[N_BLOCKS if start == 0 else 0 for _, start, _, _ in spans],
            token_on_rank=[False] * len(spans),
            token_ids=[token for _, _, tokens, _ in spans for token in tokens],
            new_block_ids=[
                block
                for admission in fresh
                for block in range(admission.row * N_BLOCKS, (admission.row + 1) * N_BLOCKS)
            ],
            next_token_ids=next_tokens,
        )
        hidden = None
        for runner in self._runners[:-1]:
            hidden = runner.forward(runner.prepare(plan), hidden)
        last = self._runners[-1]
        batch = last.prepare(plan)
        logits = last.logits(batch, hidden)
        tokens = last.sample(batch, logits)
        logprobs = last.logprobs(batch, logits, tokens)
        found = [] if logprobs is None else list(logprobs.to_host().by_span())
        return [int(token) for token in tokens], found


def check(columns: ReportedSpan, tokens: Sequence[int], rows: torch.Tensor) -> None:
    """Compares columns with a literal computation from the oracle's logits [n_tokens, any]."""
    expected = torch.log_softmax(rows.double(), -1).numpy()
    chosen = expected[np.arange(len(tokens)), list(tokens)]
    assert np.abs(columns.logprobs - chosen).max() < TOLERANCE
    assert columns.ranks.tolist() == [
        int((row > row[t]).sum()) + 1 for t, row in zip(tokens, expected, strict=True)
    ]
    order = np.argsort(-expected, kind="stable")[:, : columns.of.n_top]
    assert columns.top_ids.tolist() == order.tolist()
    likely = np.take_along_axis(expected, order, -1)
    assert np.abs(columns.top_logprobs - likely).max(initial=0.0) < TOLERANCE


@settings(max_examples=5, deadline=None)
@given(cuts=st.sets(st.integers(1, 149), max_size=5), n_stages=st.sampled_from([1, 2]))
def test_a_prompt_in_any_pieces_has_what_transformers_has(
    checkpoint: Path, oracle: Oracle, cuts: set[int], n_stages: int
) -> None:
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=150)
    expected = oracle.logits(prompt)
    assert len(prompt) > 2 * ROWS_AT_ONCE
    stages = Stages(checkpoint, n_stages)
    asking = Admission(0, len(prompt), BIASED, n_logprobs=3, n_prompt_logprobs=2)
    other = Admission(1, 3, SamplingParams(temperature=0))
    bounds = [0, *sorted(cuts), len(prompt)]
    values: list[float] = []
    tokens: list[int] = []
    beside = [4, 5, 6]
    for start, end in itertools.pairwise(bounds):
        is_last = end == len(prompt)
        spans = [
            (
                other,
                0 if start == 0 else len(beside) - 1,
                beside if start == 0 else beside[-1:],
                True,
            ),
            (asking, start, prompt[start:end], is_last),
        ]
        tokens, found = stages.run(spans, [] if is_last else [prompt[end]])
        beside.append(tokens[0])
        sampled = [columns for columns in found if columns.of.prompt_position is None]
        of_prompt = [columns for columns in found if columns.of.prompt_position is not None]
        assert len(sampled) == is_last
        for columns in of_prompt:
            assert columns.of.prompt_position == start + 1
            rows = expected[start : start + columns.of.n_tokens]
            check(columns, prompt[start + 1 : start + 1 + columns.of.n_tokens], rows)
            values += columns.logprobs.tolist()
    assert len(values) == len(prompt) - 1
    for _ in range(2):
        [columns] = sampled
        assert (columns.of.span, columns.of.n_top) == (1, 3)
        sequence = [*prompt, tokens[1]]
        check(columns, sequence[-1:], oracle.logits(sequence)[-2:-1])
        tokens, sampled = stages.run(
            [(other, len(beside) - 1, beside[-1:], True), (asking, len(prompt), [tokens[1]], True)],
            [],
        )
        prompt = sequence
        beside.append(tokens[0])


def test_nobody_who_does_not_ask_gets_any(checkpoint: Path) -> None:
    stages = Stages(checkpoint, 1)
    _, found = stages.run([(Admission(0, 3, BIASED), 0, [1, 2, 3], True)], [])
    assert found == []


@pytest.mark.parametrize("next_tokens", [[], [1, 2], [VOCAB_SIZE]], ids=str)
def test_a_plan_must_have_the_token_after_a_cut(checkpoint: Path, next_tokens: list[int]) -> None:
    admission = Admission(0, 5, BIASED, n_prompt_logprobs=0)
    with pytest.raises(PlanError, match="next_token_ids"):
        Stages(checkpoint, 1).run([(admission, 0, [1, 2, 3], False)], next_tokens)


def test_many_log_probabilities_travel_in_several_reports() -> None:
    n_tokens, n_top = 60_000, 20
    columns = LogprobColumns(
        torch.arange(n_tokens, dtype=torch.float32),
        torch.arange(n_tokens),
        torch.arange(n_tokens * n_top).view(n_tokens, n_top) % 128_000,
        torch.zeros(n_tokens, n_top),
    )
    logprobs = BatchLogprobs((LogprobSpan(4, n_tokens, n_top, 1),), columns)
    place = worker_pb2.JoinPipelineRequest(pipeline_id="p", epoch=3)
    timing = worker_pb2.IterationTiming(iteration=7)
    *earlier, last = wire.results_of(place, timing, [5], logprobs=list(logprobs.by_span()))
    assert len(earlier) > 5
    assert all(report.ByteSize() < wire.MAX_REPORT_BYTES + 2**16 for report in [*earlier, last])
    assert {report.logprobs.iteration for report in earlier} == {7}
    pieces = [piece for report in earlier for piece in report.logprobs.logprobs]
    values: list[float] = []
    for piece in [*pieces, *last.result.logprobs]:
        assert (piece.span, piece.prompt_position) == (4, 1 + len(values))
        values += logprobs_pb2.Logprobs.FromString(piece.logprobs).logprobs
    assert values == list(range(n_tokens))
