"""A model whose layers keep a state of each request: what was in the states of a rank that dies is
made again of the tokens that there are."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from orcinus.v1 import watch_pb2
from transformers import Qwen3_5TextConfig

from tests.checkpoints import SMALL, Oracle, write_family_checkpoint
from tests.frontend.checkpoints import write_checkpoint as write_tokenizer
from tests.system.conftest import MODEL
from tests.system.stack import Stack, serving

pytestmark = pytest.mark.thorough

N_TOKENS = 400
LONG = {"max_tokens": N_TOKENS, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": [5, 6, 7], "temperature": 0, **LONG},
    {"prompt": list(range(3, 90)), "temperature": 1.0, "seed": 3, **LONG},
    {"prompt": [8], "temperature": 0.7, "seed": 4, "repetition_penalty": 1.2, **LONG},
]


@pytest.fixture(name="hybrid", scope="module")
def write_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of three layers with states and one with keys, with a tokenizer."""
    config = Qwen3_5TextConfig(
        **{**SMALL, **MODEL, "num_hidden_layers": 4},
        head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    directory = write_family_checkpoint(tmp_path_factory.mktemp("hybrid"), config)
    write_tokenizer(directory)
    return directory


@pytest.fixture(name="stack", scope="module")
def serve_hybrid(hybrid: Path) -> Iterator[Stack]:
    options: dict[str, Any] = {"fail_fast": False, "frontend": "hold-s=600"}
    with serving(hybrid, stages=2, dtype="float32", **options) as stack:
        yield stack


def test_greedy_tokens_are_the_oracles(stack: Stack, hybrid: Path) -> None:
    prompt = list(range(9, 50))
    answer = stack.complete(prompt, max_tokens=12, temperature=0, ignore_eos=True)
    tokens = answer["token_ids"]
    assert tokens == Oracle(hybrid).generate(prompt, 12, guess=tokens)


@pytest.mark.parametrize("index", [0, 1])
def test_answers_go_on_with_the_same_tokens_when_a_rank_is_killed(stack: Stack, index: int) -> None:
    def ask(request: dict[str, Any]) -> list[int]:
        body = {**request, "return_token_ids": True}
        response = stack.post("/v1/completions", body, timeout_s=300)
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    def are_on_board(records: list[watch_pb2.IterationEvent]) -> bool:
        numbers = {number for record in records for number in record.numbers}
        return len(records) > 60 and len(numbers) == len(REQUESTS)

    stack.look_at_tree()
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        with stack.iterations() as watch:
            asked = [threads.submit(ask, request) for request in REQUESTS]
            watch.wait_for(are_on_board)
            stack.kill("services.worker.rank", index)
        disturbed = [each.result() for each in asked]
    assert [len(tokens) for tokens in disturbed] == [N_TOKENS] * 3
    assert disturbed == [ask(request) for request in REQUESTS]
