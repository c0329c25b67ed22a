"""Two models in one local system: each answers as itself, and one goes on while the scheduler of
the other is gone."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from orcinus.v1 import inference_pb2

from tests.generation_options import generation_options
from tests.limits import HANG_S
from tests.system.conftest import write_model
from tests.system.stack import Stack, serving

pytestmark = [pytest.mark.system, pytest.mark.thorough]

PROMPT = [3, 4, 5, 6]
N_TOKENS = 48


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The models `one` and `two`, whose weights differ."""
    made = tmp_path_factory.mktemp("models")
    for name, n_layers in (("one", 1), ("two", 2)):
        (made / name).mkdir()
        write_model(made / name, num_hidden_layers=n_layers)
    with serving(
        f"one={made / 'one'},two={made / 'two'}",  # type: ignore[arg-type]
        fail_fast=False,
    ) as running:
        yield running


def _body(model: str, **options: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": N_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }


def _tokens(stack: Stack, model: str) -> list[int]:
    answer = stack.post("/v1/completions", _body(model)).json()
    assert answer["model"] == model
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def _states(stack: Stack) -> dict[str, str]:
    listed = httpx.get(f"{stack.http}/v1/models").json()["data"]
    return {model["id"]: model["state"] for model in listed}


def _wait_serving(stack: Stack) -> None:
    deadline = time.monotonic() + HANG_S
    while set(_states(stack).values()) != {"serving"}:
        assert time.monotonic() < deadline, _states(stack)
        time.sleep(0.05)


def test_each_model_answers_as_itself_over_both_apis(stack: Stack) -> None:
    _wait_serving(stack)
    said = {name: _tokens(stack, name) for name in ("one", "two")}
    assert said["one"] != said["two"]
    options = generation_options(
        max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True, return_token_ids=True
    )
    prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=PROMPT))
    with stack.inference() as inference:
        for name, expected in said.items():
            request = inference_pb2.GenerateRequest(model=name, prompt=prompt, options=options)
            answer = inference.Generate(request)
            assert (answer.model, list(answer.choices[0].token_ids)) == (name, expected)


def test_a_model_answers_on_while_the_scheduler_of_the_other_is_gone(stack: Stack) -> None:
    _wait_serving(stack)
    said = {name: _tokens(stack, name) for name in ("one", "two")}
    states, answers = asyncio.run(_answers_around_a_loss(stack))
    assert all(answer == said["two"] for answer in answers)
    assert {"one": "unavailable", "two": "serving"} in states
    _wait_serving(stack)
    assert {name: _tokens(stack, name) for name in said} == said


async def _answers_around_a_loss(
    stack: Stack,
) -> tuple[list[dict[str, str]], list[list[int]]]:
    """Streams answers of the model `two`, and kills the scheduler of `one` at the first token.
    Returns the states of the models at the end of each answer, and the answers, until `one` is
    served again."""
    states: list[dict[str, str]] = []
    answers: list[list[int]] = []
    async with (
        httpx.AsyncClient(base_url=stack.http, timeout=HANG_S) as client,
        asyncio.timeout(HANG_S),
    ):
        while not answers or states[-1]["one"] != "serving" or len(answers) < 2:
            tokens: list[int] = []
            body = _body("two", stream=True)
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line.removeprefix("data: "))["choices"]:
                            tokens += choice.get("token_ids") or []
                        if tokens and not answers and not states:
                            stack.kill("services.scheduler")  # that of the first model
                            states.append(await _wait_lost(client))
            answers.append(tokens)
            states.append(await _states_of(client))
    return states, answers


async def _states_of(client: httpx.AsyncClient) -> dict[str, str]:
    listed = (await client.get("/v1/models")).json()["data"]
    return {model["id"]: model["state"] for model in listed}


async def _wait_lost(client: httpx.AsyncClient) -> dict[str, str]:
    while (states := await _states_of(client))["one"] == "serving":
        await asyncio.sleep(0.01)
    return states
