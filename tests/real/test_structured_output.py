"""Sampled answers of a checkpoint that talks are JSON of their schema, all of them, alone and in
batches, on one and two stages."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jsonschema_rs
import pytest

from tests.system.stack import Stack

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "country": {"enum": ["France", "Italy", "Österreich"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "sights": {
            "type": "array",
            "items": {"type": "string", "maxLength": 24},
            "minItems": 1,
            "maxItems": 3,
        },
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "population", "sights", "is_capital"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
MAX_TOKENS = 400
BATCH_SIZE = 16
ANSWER_TIMEOUT_S = 300
LONG_TIMEOUT_S = 3600


def ask(stack: Stack, seed: int) -> str:
    """Asks for one city, and returns the answer, which keeps the schema."""
    response = stack.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": f"Describe city number {seed} as JSON."}],
            "response_format": FORMAT,
            "temperature": 1,
            "seed": seed,
            "max_tokens": MAX_TOKENS,
        },
        timeout_s=ANSWER_TIMEOUT_S,
    )
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    text: str = choice["message"]["content"]
    assert choice["finish_reason"] == "stop", text
    jsonschema_rs.validate(SCHEMA, json.loads(text))
    return text


@pytest.mark.parametrize(
    ("n_alone", "n_together"),
    [
        (2, 8),
        pytest.param(200, 200, marks=(pytest.mark.thorough, pytest.mark.timeout(LONG_TIMEOUT_S))),
    ],
    ids=["10", "400"],
)
def test_every_sampled_answer_keeps_its_schema(stack: Stack, n_alone: int, n_together: int) -> None:
    alone = [ask(stack, seed) for seed in range(n_alone)]
    with ThreadPoolExecutor(BATCH_SIZE) as threads:
        together = list(threads.map(partial(ask, stack), range(n_together)))
    n_both = min(n_alone, n_together)
    assert together[:n_both] == alone[:n_both]
    assert len(set(together)) > n_together // 2
