"""A stage's part of an iteration, beyond what the oracle in test_models checks."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.forms.logits import Logits
from services.common.sampling import SamplingParams
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plan import Admission, IterationPlan, PlanError
from tests.checkpoints import SMALL, write_checkpoint
from tests.worker.pipeline import GREEDY, Pipeline, Span, load

PROMPTS = [random.Random(i).choices(range(SMALL["vocab_size"]), k=3 + 5 * i) for i in range(4)]


@pytest.fixture(name="checkpoint", scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=seed)


def prompt_plan(**changes: object) -> IterationPlan:
    """Two requests, of 3 and 2 tokens, the second of which is not sampled."""
    columns: dict[str, object] = {
        "iteration": 1,
        "released_rows": (),
        "admissions": (Admission(0, 3, GREEDY), Admission(1, 5, GREEDY)),
        "rows": (0, 1),
        "start_positions": (0, 0),
        "n_tokens": (3, 2),
        "sample": (True, False),
        "n_new_blocks": (1, 1),
        "token_on_rank": (False, False),
        "token_ids": (5, 6, 7, 8, 9),
        "new_block_ids": (0, 1),
    }
    return IterationPlan(**{**columns, **changes})  # type: ignore[arg-type]


def generate(pipeline: Pipeline, rows: dict[int, int], n_tokens: int) -> dict[int, list[int]]:
    """Continues PROMPTS, all in one batch; `rows` says which row holds which prompt."""
    for row, which in rows.items():
        pipeline.admit(row, len(PROMPTS[which]), params(seed=which))
    outputs: dict[int, list[int]] = {which: [] for which in rows.values()}
    spans = [Span(row, PROMPTS[which]) for row, which in rows.items()]
    for _ in range(n_tokens):
        sampled, _ = pipeline.run(spans)
        spans = [Span(row, [token]) for row, token in zip(rows, sampled, strict=True)]
        for which, token in zip(rows.values(), sampled, strict=True):
            outputs[which].append(token)
    return outputs


class TestSampledTokens:
    def test_do_not_depend_on_batch_rows_or_stages(self, checkpoint: Path) -> None:
        together = generate(Pipeline(checkpoint), {0: 0, 1: 1, 2: 2, 3: 3}, 8)
        for n_stages in (1, 2, 3):
            pipeline = Pipeline(checkpoint, n_stages=n_stages)
            assert generate(pipeline, {5: 2}, 8) == {2: together[2]}
            assert generate(pipeline, {9: 3, 0: 1}, 8) == {3: together[3], 1: together[1]}
        assert len({tuple(tokens) for tokens in together.values()}) == 4

    def test_do_not_depend_on_a_recovery(self, checkpoint: Path) -> None:
        expected = generate(Pipeline(checkpoint), {0: 2}, 8)[2]
        pipeline = Pipeline(checkpoint)  # a later epoch: prompt and first 3 tokens at once
        pipeline.admit(4, len(PROMPTS[2]), params(seed=2))
        recomputed = [*PROMPTS[2], *expected[:3]]
        sampled, _ = pipeline.run([Span(4, recomputed[:9], sample=False)])
        assert sampled == []
        sampled, _ = pipeline.run([Span(4, recomputed[9:])])
        assert sampled == [expected[3]]

    def test_do_not_depend_on_what_the_blocks_held_before(self, checkpoint: Path) -> None:
        pipeline = Pipeline(checkpoint, n_kv_blocks=10)
        expected = generate(Pipeline(checkpoint), {0: 3}, 4)
        for _ in range(4):  # all blocks are used several times
            assert generate(pipeline, {0: 3}, 4) == expected
            pipeline.release(0)


def most_likely(
    logits: Tensor, sequence: Sequence[int], n_prompt: int, params: SamplingParams
) -> int:
    """The token that is chosen after a sequence, with its penalties and no temperature."""
    values = logits.double().numpy().copy()
    seen = sorted(set(sequence))
    repetition = params.repetition_penalty
    values[seen] = np.where(values[seen] > 0, values[seen] / repetition, values[seen] * repetition)
    n_generated = np.bincount(sequence[n_prompt:], minlength=len(values))
    values -= params.frequency_penalty * n_generated + params.presence_penalty * (n_generated > 0)
    return int(values.argmax())


PENALIZED = [
    GREEDY,
    replace(GREEDY, frequency_penalty=0.7),
    replace(GREEDY, repetition_penalty=1.3),
    replace(GREEDY, presence_penalty=-1.5, repetition_penalty=1.4),
    replace(GREEDY, presence_penalty=2.0, frequency_penalty=-0.2, repetition_penalty=0.6),
]


@pytest.mark.parametrize(("n_stages", "tp_size"), [(1, 1), (2, 1), (3, 2)])
def test_penalties_are_for_the_whole_sequence_however_it_has_come(
    checkpoint: Path, n_stages: int, tp_size: int
) -> None:
    """In chunks of prompts, decodes, or what is recomputed of both; in rows that are used again."""
    pipeline = Pipeline(checkpoint, n_stages=n_stages, tp_size=tp_size)

    @given(seed=st.integers(0, 10**6))
    @settings(max_examples=24 // n_stages, deadline=None)
    def run(seed: int) -> None:
        chance = random.Random(seed)
        given = chance.choices(PENALIZED, k=chance.randint(1, 5))
        sequences, n_prompts, n_run = [], [], [0] * len(given)
        for row, sampling in enumerate(given):
            sequences.append([chance.randrange(12) for _ in range(chance.randint(1, 14))])
            n_prompts.append(chance.randint(1, len(sequences[row])))
            pipeline.admit(row, n_prompts[row], sampling)
        for _ in range(10):
            spans = []
            for row in chance.sample(range(len(given)), chance.randint(1, len(given))):
                waiting = sequences[row][n_run[row] :]
                chunk = waiting[: chance.randint(1, len(waiting))]
                n_run[row] += len(chunk)
                spans.append(Span(row, chunk, sample=len(chunk) == len(waiting)))
            sampled, logits = pipeline.run(spans)
            rows = [span.row for span in spans if span.sample]
            for row, token, values in zip(rows, sampled, logits, strict=True):
                expected = most_likely(values, sequences[row], n_prompts[row], given[row])
                assert token == expected, given[row]
                sequences[row].append(token)
        for row in range(len(given)):
            pipeline.release(row)

    run()


class TestStages:
    @pytest.fixture(name="stages")
    def make_stages(self, checkpoint: Path) -> list[ModelRunner]:
        return [
            ModelRunner(load(checkpoint, stage_index=i, n_stages=2), n_kv_blocks=8, block_size=4)
            for i in range(2)
        ]

    def test_pass_hidden_states_and_sample_what_is_asked(self, stages: list[ModelRunner]) -> None:
        first, last = stages
        first_batch, last_batch = (stage.prepare(prompt_plan()) for stage in stages)
        hidden = first.forward(first_batch, None)
        room = last.empty_hidden((3, 2))
        with pytest.raises(PlanError, match="32 may be in a batch"):
            last.empty_hidden((2**32 - 1, 2))
        assert (room.shape, room.dtype) == (hidden.shape, hidden.dtype)
        room.copy_(hidden)
        logits = last.logits(last_batch, room)
        assert logits.values.shape == (1, SMALL["vocab_size"])
        assert logits.values.dtype == torch.float32
        argmax = logits.values.argmax(-1).tolist()
        assert last.sample(last_batch, logits).tolist() == argmax

    def test_count_tokens_only_where_they_are_sampled(self, stages: list[ModelRunner]) -> None:
        penalised = replace(GREEDY, presence_penalty=1)
        plan = prompt_plan(admissions=(Admission(0, 3, penalised), Admission(1, 5, GREEDY)))
        first, last = (stage.prepare(plan).counted for stage in stages)
        assert first is None
        assert last is not None

    def test_sample_nothing_when_nothing_is_asked(self, checkpoint: Path) -> None:
        runner = ModelRunner(load(checkpoint), n_kv_blocks=8, block_size=4)
        batch = runner.prepare(prompt_plan(sample=(False, False)))
        tokens = runner.sample(batch, runner.logits(batch, None))
        assert tokens.tolist() == []

    def test_refuse_the_wrong_kind_of_input(self, stages: list[ModelRunner]) -> None:
        first, last = stages
        first_batch, last_batch = (stage.prepare(prompt_plan()) for stage in stages)
        with pytest.raises(ValueError, match="first stage takes no hidden"):
            first.forward(first_batch, first.empty_hidden((3, 2)))
        with pytest.raises(ValueError, match="every other stage does"):
            last.forward(last_batch, None)
        with pytest.raises(ValueError, match=r"hidden states \(4, 48\)"):
            last.forward(last_batch, last.empty_hidden((2, 2)))
        with pytest.raises(ValueError, match="bfloat16"):
            last.forward(last_batch, last.empty_hidden((3, 2)).bfloat16())

    def test_only_the_last_has_logits(self, stages: list[ModelRunner]) -> None:
        first, _ = stages
        batch = first.prepare(prompt_plan())
        with pytest.raises(RuntimeError, match="last stage"):
            first.model.logits(first.forward(batch, None))
        batch = first.prepare(prompt_plan(iteration=2, released_rows=(0, 1)))
        with pytest.raises(RuntimeError, match="last stage"):
            first.logits(batch, None)

    def test_know_their_layers(self, stages: list[ModelRunner]) -> None:
        models = [stage.model for stage in stages]
        assert [(model.first_layer, model.n_layers) for model in models] == [(0, 2), (2, 1)]
        assert {model.hidden_size for model in models} == {48}


def test_plans_are_checked_against_the_models_limits(checkpoint: Path) -> None:
    runner = ModelRunner(load(checkpoint), n_kv_blocks=8, block_size=4)
    with pytest.raises(PlanError, match="token_ids"):
        runner.prepare(prompt_plan(token_ids=(5, 6, 7, 8, SMALL["vocab_size"])))


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": ((SMALL["vocab_size"], 1.0),)},
        {"allowed_token_ids": (5, SMALL["vocab_size"])},
        {"bad_token_ids": (-1,)},
    ],
    ids=str,
)
def test_options_for_tokens_that_there_are_not_are_refused(
    checkpoint: Path, options: dict[str, object]
) -> None:
    runner = ModelRunner(load(checkpoint), n_kv_blocks=8, block_size=4)
    admissions = (Admission(0, 3, replace(GREEDY, **options)), Admission(1, 5, GREEDY))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=next(iter(options))):
        runner.prepare(prompt_plan(admissions=admissions))


def test_a_model_that_computes_nonsense_is_noticed(checkpoint: Path) -> None:
    runner = ModelRunner(load(checkpoint), n_kv_blocks=8, block_size=4)
    batch = runner.prepare(prompt_plan())
    logits = runner.logits(batch, None)
    assert min(runner.sample(batch, logits).tolist()) >= 0
    broken = Logits(logits.values.clone())
    broken.values[0, 2] = torch.nan
    assert runner.sample(batch, broken).tolist() == [-1]
    # It may have been used on the rank before anybody has seen it.
    decode = prompt_plan(
        iteration=2,
        admissions=(),
        rows=(0,),
        start_positions=(3,),
        n_tokens=(1,),
        sample=(True,),
        n_new_blocks=(0,),
        token_on_rank=(True,),
        token_ids=(),
        new_block_ids=(),
    )
    assert runner.prepare(decode).token_ids.tolist() == [0]
