"""The tokens of a checkpoint that talks are those of `transformers`, for texts and for chats, alone
and in batches, on one and two stages."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.checkpoints import Oracle
from tests.system.stack import Stack

MAX_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a whale that",
    "def fibonacci(n):\n",
    "Größe und Länge: 12 + 34 = ",
]
SYSTEM = {"role": "system", "content": "Answer in one short sentence."}
CAPITAL = {"role": "user", "content": "What is the capital of France?"}
CHATS: dict[str, list[dict[str, str]]] = {
    "a question": [CAPITAL],
    "with a system message": [SYSTEM, {"role": "user", "content": "Why is the sky blue?"}],
    "a third turn": [
        CAPITAL,
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?  <b>Only</b> the name, please — danke."},
    ],
}


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


Generate = Callable[[tuple[int, ...]], list[int]]


@pytest.fixture(scope="module")
def generate(oracle: Oracle) -> Generate:
    """The greedy answer of `transformers` to a prompt, which is computed once."""
    return cache(lambda prompt: oracle.generate(list(prompt), MAX_TOKENS))


def complete(stack: Stack, prompt: str, **options: Any) -> dict[str, Any]:
    return stack.complete(prompt, **{"max_tokens": MAX_TOKENS, "temperature": 0, **options})


def chat(stack: Stack, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": MAX_TOKENS, "return_token_ids": True, **options}
    response = stack.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_those_of_transformers(
    stack: Stack, generate: Generate, tokenizer: Any, prompt: str
) -> None:
    prompt_ids = tokenizer(prompt).input_ids
    answer = complete(stack, prompt)
    assert answer["prompt_token_ids"] == prompt_ids
    expected = generate(tuple(prompt_ids))
    assert answer["token_ids"] == expected
    assert answer["text"] == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
def test_a_chat_is_written_with_the_template_and_answered_as_by_transformers(
    stack: Stack, generate: Generate, tokenizer: Any, messages: list[dict[str, str]]
) -> None:
    prompt_ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    answer = chat(stack, messages, temperature=0)
    [choice] = answer["choices"]
    assert answer["prompt_token_ids"] == prompt_ids
    assert answer["usage"]["prompt_tokens"] == len(prompt_ids)
    expected = generate(tuple(prompt_ids))
    assert choice["token_ids"] == expected
    assert choice["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert choice["finish_reason"] == ("stop" if tokenizer.eos_token_id in expected else "length")


def test_it_really_talks(one_stage: Stack) -> None:
    [choice] = chat(one_stage, [CAPITAL], temperature=0)["choices"]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"


def test_sampled_tokens_depend_on_seeds_and_not_on_batches_or_stages(
    one_stage: Stack, two_stages: Stack
) -> None:
    options: list[dict[str, Any]] = [
        {"prompt": prompt, "seed": seed, "temperature": 0.8, "top_p": 0.95, "top_k": 40}
        for prompt in PROMPTS
        for seed in (1, 2)
    ]
    alone = [complete(one_stage, **option)["token_ids"] for option in options]
    assert [complete(one_stage, **option)["token_ids"] for option in options[:2]] == alone[:2]
    assert alone[0] != alone[1]
    for stack in (one_stage, two_stages):
        with ThreadPoolExecutor(len(options)) as threads:
            together = threads.map(lambda option, stack=stack: complete(stack, **option), options)
            assert [answer["token_ids"] for answer in together] == alone


def test_an_answer_ends_before_a_stop_string(stack: Stack) -> None:
    whole = complete(stack, PROMPTS[0])["text"]
    stop = whole.split()[2]
    answer = complete(stack, PROMPTS[0], stop=[stop, "never"])
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == whole.partition(stop)[0]
