"""Drafts change no token: what a span with drafts brings, one token at a time brings too."""

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from kernels.weights.linear import Quantization
from services.common.sampling import SamplingParams
from services.scheduler.core.drafting.drafter import Drafter, Propose
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.request import TOKEN_ID, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation import Speculation
from services.worker.engine.plan import PlanError
from services.worker.rank.reported_tokens import least_used
from tests.checkpoints import SMALL, write_checkpoint
from tests.scheduler.core.workload import build
from tests.worker.engine.test_scheduled_runs import WANTS, Rank, serve
from tests.worker.engine.test_scheduled_runs import make_alone as make_alone
from tests.worker.engine.test_scheduled_runs import make_checkpoint as make_checkpoint
from tests.worker.pipeline import Pipeline, Span, needs_int8

VOCAB_SIZE = SMALL["vocab_size"]


def prompted(sequence: Sequence[int], alone: list[list[int]]) -> list[int]:
    """Returns what follows a sequence of one of WANTS."""
    for index, tokens in enumerate(alone):
        whole = [*WANTS[index].request(index).prompt_token_ids, *tokens]
        if whole[: len(sequence)] == list(sequence):
            return whole[len(sequence) :]
    raise AssertionError("nobody has this sequence")


def right_for(alone: list[list[int]], n_right: Callable[[], int]) -> Propose:
    """Returns a function whose drafts are right for so many tokens."""

    def propose(packed: bytes, length: int) -> list[int]:
        right = prompted(array(TOKEN_ID, packed).tolist(), alone)[:length]
        n = n_right()
        wrong = [(token_id + 1) % VOCAB_SIZE for token_id in right[n:]]
        return [*right[:n], *wrong]

    return propose


def drafting(
    propose: Propose, *, depth: int, n_blocks: int = 60, optimistic: bool = False
) -> Scheduler:
    use = None
    if optimistic:
        use = ExpectedUse()
        use.share = 0.0
    return build(
        max_batch_size=4,
        n_blocks=n_blocks,
        block_size=4,
        pipeline_depth=depth,
        token_hand_off=True,
        policy=ChunkedPolicy(max_batch_size=4, max_batch_tokens=9),
        has_prefix_cache=True,
        expected_use=use,
        drafter=Drafter(max_drafts=5, max_batch_tokens=100, propose=propose),
    )


def requests_for(stops: Sequence[frozenset[int]] | None = None) -> list[Request]:
    """Returns the requests of WANTS. Tokens are drafted for those whose options allow it."""
    requests = [
        want.request(index, frozenset() if stops is None else stops[index])
        for index, want in enumerate(WANTS)
    ]
    for want, request in zip(WANTS, requests, strict=True):
        penalties = (want.presence_penalty, want.frequency_penalty, want.repetition_penalty)
        if penalties == (0, 0, 1) and not want.bad_words:
            request.speculation = Speculation(acceptance=1, length=5)
    return requests


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["right", "wrong", "partly right"])
def test_tokens_do_not_depend_on_drafts(
    checkpoint: Path, alone: list[list[int]], kind: str, depth: int
) -> None:
    draw = random.Random(depth).randint
    n_right = {"right": lambda: 9, "wrong": lambda: 0, "partly right": lambda: draw(0, 5)}[kind]
    scheduler = drafting(right_for(alone, n_right), depth=depth)
    requests = requests_for()
    serve(Rank(checkpoint), scheduler, requests)
    assert [list(request.generated_token_ids) for request in requests] == alone
    drafter = scheduler.drafter
    assert drafter is not None
    assert drafter.n_drafted > 15
    assert (drafter.n_accepted == 0) == (kind == "wrong")
    assert (drafter.n_accepted == drafter.n_drafted) == (kind == "right")


def test_tokens_do_not_depend_on_drafts_where_memory_is_taken_back(
    checkpoint: Path, alone: list[list[int]]
) -> None:
    draw = random.Random(1).randint
    propose = right_for(alone, lambda: draw(0, 5))
    scheduler = drafting(propose, depth=2, n_blocks=9, optimistic=True)
    requests = requests_for()
    serve(Rank(checkpoint), scheduler, requests)
    assert [list(request.generated_token_ids) for request in requests] == alone
    assert sum(request.n_preemptions for request in requests) > 0
    assert scheduler.drafter is not None
    assert scheduler.drafter.n_accepted > 5


def test_what_follows_a_stop_token_is_dropped(checkpoint: Path, alone: list[list[int]]) -> None:
    stops = [frozenset(tokens[4:5]) for tokens in alone]
    stops[4] = frozenset()  # whose tokens depend on its stop tokens, for its `min_tokens`
    requests = requests_for(stops)
    serve(Rank(checkpoint), drafting(right_for(alone, lambda: 9), depth=1), requests)
    for request, tokens, stop in zip(requests, alone, stops, strict=True):
        end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
        if not WANTS[int(request.request_id)].min_tokens:
            assert list(request.generated_token_ids) == tokens[: end + 1]


@pytest.mark.parametrize(
    ("dtype", "quantization", "n_stages", "tp_size"),
    [
        ("float32", "none", 1, 1),
        ("bfloat16", "none", 2, 1),
        ("float32", "none", 1, 2),
        pytest.param("bfloat16", "int8", 2, 1, marks=needs_int8),
        pytest.param("bfloat16", "int4", 2, 1, marks=needs_int8),
    ],
    ids=["float32", "bfloat16 on 2 stages", "2 ranks", "int8 on 2 stages", "int4 on 2 stages"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_span_with_drafts_has_the_logits_of_its_tokens_one_by_one(
    tmp_path: Path,
    dtype: str,
    quantization: Quantization,
    n_stages: int,
    tp_size: int,
    temperature: float,
) -> None:
    checkpoint = write_checkpoint(tmp_path)
    sampling = SamplingParams(temperature=temperature, seed=3)

    def start() -> tuple[Pipeline, list[int]]:
        pipeline = Pipeline(
            checkpoint,
            n_stages=n_stages,
            tp_size=tp_size,
            dtype=dtype,
            quantization=quantization,
        )
        for row in (0, 1):
            pipeline.admit(row, 7, sampling)
        first, _ = pipeline.run([Span(0, range(3, 10)), Span(1, range(20, 27))])
        return pipeline, first

    pipeline, tokens = start()
    other, outputs, all_logits = tokens[1], [tokens[0]], []
    for _ in range(6):
        (token, other), logits = pipeline.run([Span(0, outputs[-1:]), Span(1, [other])])
        outputs.append(token)
        all_logits.append(logits[0])
    pipeline, tokens = start()
    wrong = [(token + 1) % VOCAB_SIZE for token in outputs[3:5]]
    sampled, logits = pipeline.run(
        [Span(0, [*outputs[:3], *wrong], n_drafts=4), Span(1, tokens[1:])]
    )
    assert sampled[:3] == outputs[1:4]
    assert torch.equal(logits[:3], torch.stack(all_logits[:3]))
    pipeline.forget(0, 2)
    sampled, logits = pipeline.run([Span(0, outputs[3:6], n_drafts=2)])
    assert sampled == outputs[4:7]
    assert torch.equal(logits, torch.stack(all_logits[3:]))


@pytest.mark.parametrize(
    ("n_drafts", "sampling", "message"),
    [
        (2, SamplingParams(), "nothing to verify"),
        (1, SamplingParams(presence_penalty=1), "do not allow"),
    ],
    ids=["nothing but drafts", "penalties"],
)
def test_drafts_that_cannot_be_verified_are_refused(
    tmp_path: Path, n_drafts: int, sampling: SamplingParams, message: str
) -> None:
    pipeline = Pipeline(write_checkpoint(tmp_path))
    pipeline.admit(0, 3, sampling)
    pipeline.run([Span(0, [1, 2, 3])])
    with pytest.raises(PlanError, match=message):
        pipeline.run([Span(0, [4, 5], n_drafts=n_drafts)])


def test_tokens_that_are_no_drafts_cannot_be_replaced(tmp_path: Path) -> None:
    pipeline = Pipeline(write_checkpoint(tmp_path))
    pipeline.admit(0, 3)
    pipeline.run([Span(0, [1, 2, 3])])
    pipeline.run([Span(0, [4, 5, 6], n_drafts=2)])
    pipeline.forget(0, 3)
    with pytest.raises(PlanError, match="does not continue"):
        pipeline.run([Span(0, [4])])


def test_logits_after_a_wrong_draft_are_nobodys() -> None:
    sampled = [5, 6, -1, -1, 9, -1, 2]
    assert least_used(sampled, [[5, 7, 8], [], [3]]) == [5, 9, -1]
    assert least_used([-1, 4], [[3]]) == [-1]
    assert least_used([3, -1], [[3]]) == [-1]
