"""The official `openai` package over every option that is served, on a checkpoint that talks."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.real.conftest import MODEL
from tests.system.stack import Stack

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
PARIS_TOKEN = 7042
"""The token " Paris"."""


class City(BaseModel):
    """What `parse()` is asked for."""

    name: Literal["Paris", "Rome"]
    is_capital: bool


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": City.model_json_schema(),
    },
}


@pytest.fixture(scope="module")
def client(two_stages: Stack) -> Iterator[openai.OpenAI]:
    """The client of the system whose chat template knows tools."""
    url = f"{two_stages.http}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    body = {"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_tokens": 16, **options}
    return client.chat.completions.create(**body)


def test_chats_whole_and_streamed(client: openai.OpenAI) -> None:
    chat(client)  # from now on, as many tokens of the prompt are cached
    whole = chat(client)
    assert whole.choices[0].message.content == PARIS
    assert whole.choices[0].finish_reason == "stop"
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage) == ([], whole.usage)
    with client.chat.completions.stream(model=MODEL, messages=CAPITAL, temperature=0) as events:
        assert events.get_final_completion().choices[0].message.content == PARIS


async def test_the_asynchronous_client(two_stages: Stack) -> None:
    url = f"{two_stages.http}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def streamed() -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=CAPITAL, temperature=0, max_tokens=16, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def whole() -> str | None:
            answer = await client.chat.completions.create(
                model=MODEL, messages=CAPITAL, temperature=0, max_tokens=16
            )
            return answer.choices[0].message.content

        answers = await asyncio.gather(streamed(), whole(), streamed(), whole())
    assert list(answers) == [PARIS] * 4


def test_completions_of_several_prompts_stop_strings_and_echo(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=8, temperature=0, stop=["\n", "."], echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text.startswith(prompt)
        assert not set("\n.") & set(choice.text)
    assert "Paris" in answer.choices[0].text


def test_several_sampled_answers_come_again_with_their_seed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1.2, "top_p": 0.9}
    first, again = chat(client, **options), chat(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1
    assert [choice.message.content for choice in again.choices] == texts
    pieces = [""] * 3
    for chunk in chat(client, **options, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == texts


def test_biases_and_penalties_change_what_is_written(client: openai.OpenAI) -> None:
    banned = chat(client, logit_bias={str(PARIS_TOKEN): -100}).choices[0].message.content
    assert "Paris" not in banned
    wanted = chat(client, logit_bias={str(PARIS_TOKEN): 100}, max_tokens=4)
    assert wanted.choices[0].message.content == " Paris" * 4
    punished = chat(
        client, logit_bias={str(PARIS_TOKEN): 40}, frequency_penalty=2, presence_penalty=2
    )
    assert punished.choices[0].message.content


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_limits_of_both_names(client: openai.OpenAI, field: str) -> None:
    body: Any = {"model": MODEL, "messages": CAPITAL, field: 3}
    answer = client.chat.completions.create(**body)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_formats(client: openai.OpenAI) -> None:
    schema = {"name": "city", "schema": City.model_json_schema(), "strict": True}
    answer = chat(
        client, response_format={"type": "json_schema", "json_schema": schema}, max_tokens=64
    )
    assert City.model_validate_json(answer.choices[0].message.content)
    free = chat(client, response_format={"type": "json_object"}, max_tokens=400, temperature=1)
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)
    text = chat(client, response_format={"type": "text"})
    assert text.choices[0].message.content == PARIS


def test_parse_returns_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=CAPITAL, response_format=City, temperature=1, max_tokens=64
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_errors_are_those_of_the_package(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, temperature=9)
    assert error.value.param == "temperature"
    assert [model.id for model in client.models.list()] == [MODEL]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        chat(client, model="gpt-4o")
    assert error.value.code == "model_not_found"


def test_a_model_by_its_id(client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == MODEL


def test_unknown_fields_are_ignored(client: openai.OpenAI) -> None:
    answer = chat(client, extra_body={"some_new_field": {"a": [1]}}, verbosity="low")
    assert answer.choices[0].message.content == PARIS


def test_log_probabilities_of_chats(client: openai.OpenAI) -> None:
    [choice] = chat(client, logprobs=True, top_logprobs=2).choices
    text = b"".join(bytes(item.bytes) for item in choice.logprobs.content)
    assert text.decode().removesuffix("<|im_end|>") == PARIS
    for item in choice.logprobs.content:
        assert item.logprob <= 0
        assert len(item.top_logprobs) == 2
        assert item.top_logprobs[0].logprob == item.logprob


def test_log_probabilities_of_completions_and_their_prompts(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, temperature=0, logprobs=1, echo=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    best = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, n=1, best_of=3)
    assert len(best.choices) == 1


@pytest.mark.parametrize(
    "tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_calls_that_must_be_made_keep_their_schema(client: openai.OpenAI, tool_choice: Any) -> None:
    asked: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {"tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 64}
    whole = chat(client, messages=asked, tool_choice=tool_choice, **options)
    message = whole.choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "get_weather"
    assert City.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(
        model=MODEL, messages=asked, tool_choice=tool_choice, temperature=0, **options
    ) as events:
        streamed = events.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None
    assert [item.function.arguments for item in streamed] == [call.function.arguments]
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 °C and sunny"}
    answer = chat(client, messages=[*asked, message, result], tool_choice="none", tools=[WEATHER])
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input=CAPITAL[0]["content"], temperature=0, max_output_tokens=16
    )
    assert answer.output_text == PARIS
    with client.responses.stream(
        model=MODEL, input=CAPITAL[0]["content"], temperature=0, max_output_tokens=16
    ) as events:
        text = "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        assert text == events.get_final_response().output_text == PARIS
