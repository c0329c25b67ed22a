"""The whole system against `transformers`: many requests at once, greedy, in fp32, token for
token."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.checkpoints import Oracle
from tests.system.conftest import tokens, write_model
from tests.system.stack import Stack, serving

N_REQUESTS = 32
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    ("n_stages", "config"),
    [
        pytest.param(
            1, {"tie_word_embeddings": True}, id="1 stage, GQA, tied", marks=pytest.mark.thorough
        ),
        pytest.param(
            2,
            {"rope_parameters": LLAMA3_ROPE},
            id="2 stages, GQA, scaled rope",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            3,
            {"num_key_value_heads": 6, "num_hidden_layers": 4, "tie_word_embeddings": True},
            id="3 stages, uneven, MHA, tied",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_32_mixed_requests_at_once_equal_transformers(
    tmp_path: Path, n_stages: int, config: dict[str, Any]
) -> None:
    model = write_model(tmp_path, **config)
    with serving(model, stages=n_stages, dtype="float32", max_batch_size=8) as stack:
        check_mixed_requests(stack, model, Random(n_stages))


def test_mixed_requests_equal_transformers_where_other_tests_have_their_system(
    model: Path, two_stages: Stack
) -> None:
    check_mixed_requests(two_stages, model, Random(2))


def check_mixed_requests(stack: Stack, model: Path, random: Random) -> None:
    """Asks for 32 greedy answers at once; each is what `transformers` generates."""
    requests = [
        (tokens(random, 90), random.randint(1, 24), random.choice([1.0, 1.0, 1.3, 0.8]))
        for _ in range(N_REQUESTS)
    ]

    def ask(request: tuple[list[int], int, float]) -> dict[str, Any]:
        prompt, max_tokens, repetition = request
        return stack.complete(
            prompt, max_tokens=max_tokens, temperature=0, repetition_penalty=repetition
        )

    with ThreadPoolExecutor(N_REQUESTS) as threads:
        choices = list(threads.map(ask, requests))
    oracle = Oracle(model)
    for (prompt, max_tokens, repetition), choice in zip(requests, choices, strict=True):
        expected = oracle.generate(
            prompt, max_tokens, repetition_penalty=repetition, guess=choice["token_ids"]
        )
        assert choice["token_ids"] == expected, prompt
        is_stopped = expected[-1] == 1
        assert choice["finish_reason"] == ("stop" if is_stopped else "length")


def ask_at_once(stack: Stack, sampled: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the tokens of requests that run together."""
    with ThreadPoolExecutor(len(sampled)) as threads:
        answers = threads.map(
            lambda item: stack.complete(**{k: v for k, v in item.items() if k != "expected"}),
            sampled,
        )
        return [answer["token_ids"] for answer in answers]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(
    one_stage: Stack, sampled: list[dict[str, Any]]
) -> None:
    got = ask_at_once(one_stage, sampled)
    assert got == [item["expected"] for item in sampled]
    assert len({tuple(tokens) for tokens in got}) > len(got) // 2, "they are not all the same"


@pytest.mark.thorough
@pytest.mark.parametrize("n_stages", [1, 3])
def test_a_seed_gives_the_same_tokens_in_batches_on_any_number_of_stages(
    model: Path, sampled: list[dict[str, Any]], n_stages: int
) -> None:
    with serving(model, stages=n_stages, dtype="float32", max_batch_size=5) as stack:
        got = ask_at_once(stack, sampled)
    assert got == [item["expected"] for item in sampled]
