"""Log-probabilities against `transformers`, in float32: of prompts and of what is generated."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.checkpoints import Oracle
from tests.system.conftest import tokens
from tests.system.stack import Stack, serving

TOLERANCE = 1e-4
N_TOP = 5


def check(oracle: Oracle, prompt: list[int], choice: dict[str, Any]) -> None:
    """Compares an echoed answer's log-probabilities with the oracle's, prompt and answer alike."""
    sequence = [*prompt, *choice["token_ids"]]
    expected = torch.log_softmax(oracle.logits(sequence).double(), -1)
    logprobs = choice["logprobs"]
    values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert len(values) == len(tops) == len(logprobs["tokens"]) == len(sequence)
    assert (values[0], tops[0]) == (None, None)
    for place in range(1, len(sequence)):
        row = expected[place - 1]
        assert abs(values[place] - row[sequence[place]].item()) < TOLERANCE
        likely = row.topk(N_TOP).values.tolist()
        # Tokens that read alike share a name, which has the larger value.
        got = sorted(tops[place].values(), reverse=True)
        assert abs(got[0] - likely[0]) < TOLERANCE
        assert all(
            min(abs(value - other) for other in [*likely, values[place]]) < TOLERANCE
            for value in got
        )


def ask_all(stack: Stack, oracle: Oracle) -> None:
    random = Random(3)
    requests: list[dict[str, Any]] = [
        {
            "prompt": tokens(random, 90),
            "max_tokens": random.randint(1, 8),
            "echo": True,
            "logprobs": N_TOP,
            **({"temperature": 0} if index % 2 else {"seed": index, "presence_penalty": 1.0}),
        }
        for index in range(16)
    ]
    plain: list[dict[str, Any]] = [
        {"prompt": tokens(random, 60), "max_tokens": 20, "seed": i} for i in range(8)
    ]
    with ThreadPoolExecutor(24) as threads:
        others = threads.map(lambda body: stack.complete(**body), plain)
        choices = list(threads.map(lambda body: stack.complete(**body), requests))
        assert all(choice["logprobs"] is None for choice in others)
    for body, choice in zip(requests, choices, strict=True):
        check(oracle, body["prompt"], choice)


def test_of_mixed_batches_equal_transformers(one_stage: Stack, model: Path) -> None:
    ask_all(one_stage, Oracle(model))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2},
        {"stages": 2, "max_batch_tokens": 16, "max_batch_size": 8},
        {"tp": 2},
        {"policy": "orca", "stages": 2},
    ],
    ids=str,
)
def test_of_any_deployment_equal_transformers(model: Path, options: dict[str, Any]) -> None:
    with serving(model, dtype="float32", **options) as stack:
        ask_all(stack, Oracle(model))
