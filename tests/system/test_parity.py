"""Both protocols on a real engine: the same tokens, texts, finish reasons and usage, whole and
streamed."""

from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import pytest

from services.common import rpc
from tests.frontend.conftest import InferenceClient
from tests.limits import HANG_S
from tests.system.conftest import tokens
from tests.system.stack import Stack
from tests.ways import OTHER_WAYS, over_http

pytestmark = pytest.mark.thorough

CHAT = {"messages": [{"role": "user", "content": "once upon a time"}], "max_tokens": 12}
SAMPLED = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "hello wörld", "temperature": 0, "max_tokens": 20},
    "sampled": {"prompt": "hello wörld", "max_tokens": 20, **SAMPLED},
    "tokens": {"prompt": tokens(Random(3), 60), "max_tokens": 20, **SAMPLED},
    "chat": {**CHAT, "temperature": 0},
    "chat, n": {**CHAT, **SAMPLED, "n": 3},
    "several": {"prompt": ["hello", "世界", "x"], "n": 2, "max_tokens": 8, **SAMPLED},
    "echo": {"prompt": ["hello", "世界"], "echo": True, "max_tokens": 8, "temperature": 0},
    "penalties": {
        "prompt": "the quick", "frequency_penalty": 0.8, "repetition_penalty": 1.2,
        "max_tokens": 20, **SAMPLED,
    },
    "rules": {
        "prompt": "the quick", "allowed_token_ids": [40, 41, 42, 43], "bad_token_ids": [42],
        "logit_bias": {"41": 5}, "max_tokens": 20, "ignore_eos": True, **SAMPLED,
    },
    "stop": {"prompt": "the lazy", "stop": ["e", "o", "a"], "max_tokens": 60, **SAMPLED},
    "bad words": {"prompt": "the lazy", "bad_words": ["the", "file"], "max_tokens": 9, **SAMPLED},
    "too long": {"prompt": [5] * 5000, "max_tokens": 5},
}  # fmt: skip


@dataclass(frozen=True)
class Clients:
    """Clients of a system."""

    http: httpx.AsyncClient
    inference: InferenceClient


@pytest.mark.parametrize("case", CASES)
async def test_a_real_engine_answers_both_protocols_alike(one_stage: Stack, case: str) -> None:
    body = {**CASES[case], "return_token_ids": True}
    async with (
        httpx.AsyncClient(base_url=one_stage.http, timeout=HANG_S) as http,
        rpc.connect(one_stage.grpc) as channel,
    ):
        clients = Clients(http, InferenceClient(channel))
        expected = await over_http(clients, body)
        assert bool(expected.error) == (case == "too long")
        for name, way in OTHER_WAYS.items():
            outcome = await way(clients, body)
            assert outcome.answers == expected.answers, name
            assert outcome.usage == expected.usage, name
            assert (outcome.error, outcome.field) == (expected.error, expected.field), name
