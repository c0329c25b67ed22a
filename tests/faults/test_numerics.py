"""Requests whose numbers break fail alone: streams beside them have their tokens to the bit, and no
process is started again.

    make test-numerics NUMERICS_N=200

`NUMERICS_N` is the number of requests that break. Two rows of the model's embedding are damaged,
and each of these requests has one of the two tokens in its prompt or is made to generate it.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import httpx
import pytest
import torch
from orcinus.v1 import inference_pb2
from safetensors.torch import load_file, save_file

from services.scheduler.core.admission.suspects import NOT_FINITE
from tests.system.conftest import VOCAB_SIZE, write_model
from tests.system.stack import Stack, serving

N_BROKEN = int(os.environ.get("NUMERICS_N") or 12)
N_GOOD = int(os.environ.get("NUMERICS_GOOD") or 8)
N_AT_ONCE = 16

DAMAGED = {VOCAB_SIZE - 1: torch.nan, VOCAB_SIZE - 2: torch.inf}
"""The numbers in the damaged rows of the embedding, by their tokens."""

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16 on two stages": {"dtype": "bfloat16", "stages": 2},
    "int8 with the paper's algorithm": {"quantization": "int8", "policy": "orca"},
    "int4 on two ranks": {"quantization": "int4", "tp": 2},
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with two damaged rows, whose tokens no request samples unless it is made to."""
    directory = write_model(tmp_path_factory.mktemp("damaged"), num_hidden_layers=2)
    file = directory / "model.safetensors"
    weights = load_file(file)
    for token_id, number in DAMAGED.items():
        weights["model.embed_tokens.weight"][token_id] = number
        weights["lm_head.weight"][token_id] = 0
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def prompt_of(random: Random, n_tokens: int) -> list[int]:
    return [random.randrange(3, VOCAB_SIZE - len(DAMAGED)) for _ in range(n_tokens)]


def good_bodies(random: Random) -> list[dict[str, Any]]:
    """Streams whose tokens depend on nothing that is damaged, many with a common beginning."""
    stem = prompt_of(random, 40)
    sampling: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0, "logprobs": 2},
    ]
    return [
        {
            "prompt": [*stem, *prompt_of(random, 1 + number % 7)],
            "max_tokens": 24,
            "ignore_eos": True,
            "seed": number,
            "return_token_ids": True,
            **sampling[number % len(sampling)],
        }
        for number in range(N_GOOD)
    ]


def broken_bodies(random: Random) -> Iterator[dict[str, Any]]:
    """Yields requests that break: in their prompts, or when they have generated a token."""
    stem = prompt_of(random, 40)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1, "seed": 3, "top_k": 5},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"n": 2, "temperature": 1},
        {"frequency_penalty": 1.5, "min_tokens": 2},
        {"structured_outputs": {"regex": "[ab]{3}"}},
        {"prompt": prompt_of(random, 5), "allowed_token_ids": [VOCAB_SIZE - 1]},
        {"prompt": prompt_of(random, 900)},
    ]
    tokens = itertools.cycle(DAMAGED)
    for option in itertools.cycle(options):
        prompt = option.get("prompt", stem[: random.randrange(1, 40)])
        if "allowed_token_ids" not in option:
            place = random.randrange(len(prompt) + 1)
            prompt = [*prompt[:place], next(tokens), *prompt[place:]]
        yield {"max_tokens": 8, **option, "prompt": prompt}


async def token_ids_of(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """Returns the tokens of a stream."""
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                [choice] = httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]
                token_ids += choice.get("token_ids") or ()
            assert "error" not in line
    return token_ids


async def check_broken(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 500, (body, response.text)
    error = response.json()["error"]
    assert error["code"] == "request_failed", error
    assert NOT_FINITE in error["message"], error


async def drill(stack: Stack) -> None:
    random = Random(7)
    bodies = good_bodies(random)
    broken = itertools.islice(broken_bodies(random), N_BROKEN)
    async with httpx.AsyncClient(base_url=stack.http, timeout=120) as client:
        alone = [await token_ids_of(client, body) for body in bodies]
        await check_broken(client, {"prompt": [5, 6, VOCAB_SIZE - 1], "max_tokens": 4})
        await check_broken(client, {"prompt": [5, 6, VOCAB_SIZE - 1], "max_tokens": 4})

        async def break_one_after_the_other() -> None:
            for body in broken:
                await check_broken(client, body)

        _, *beside = await asyncio.gather(
            asyncio.gather(*(break_one_after_the_other() for _ in range(N_AT_ONCE))),
            *(token_ids_of(client, body) for body in bodies),
        )
        assert beside == alone
        assert [await token_ids_of(client, body) for body in bodies[:2]] == alone[:2]


def check_grpc(stack: Stack) -> None:
    token_ids = inference_pb2.TokenIds(ids=[5, VOCAB_SIZE - 1])
    request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(token_ids=token_ids))
    with stack.inference() as stub, pytest.raises(grpc.RpcError) as failed:
        stub.Generate(request, timeout=60)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert NOT_FINITE in str(failed.value.details())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_break_fail_alone(damaged: Path, kind: str) -> None:
    # A service that dies ends all, as the option `--fail-fast` says.
    with serving(damaged, metrics=True, **KINDS[kind]) as stack:
        asyncio.run(drill(stack))
        check_grpc(stack)
        metrics = stack.metrics("scheduler")
        output = "".join(stack.output)
    assert metrics.sum("orcinus_requests_broken_total") >= N_BROKEN + 3
    assert metrics.sum("orcinus_requests_suspended_total") == 0
    assert output.count(f"fails: {NOT_FINITE}") >= N_BROKEN + 3
    assert " is over: " not in output
