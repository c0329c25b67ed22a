"""Headers of answers that say what of a request is not kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.frontend.http.protocol.generating import LEFT_OUT
from tests.fake_scheduler import PIPELINE, FakeScheduler, says
from tests.frontend.conftest import running

TEMPLATE = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% else %}"
    "{{ m.content }}{% endfor %}{% endfor %}"
)
"""A template that leaves out the content of a turn of calls, as those of Llama 3 and Mistral do."""

FUNCTION = {"name": "f", "arguments": "{}"}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "1", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": "1", "content": "y"},
]
TURNS: list[dict[str, Any]] = [
    CHAT[0],
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "y"}]},
]
ITEMS: list[dict[str, Any]] = [
    CHAT[0],
    {"role": "assistant", "content": "I look."},
    {"type": "function_call", "call_id": "1", **FUNCTION},
    {"type": "function_call_output", "call_id": "1", "output": "y"},
]


@pytest.mark.asyncio
async def test_answers_name_what_the_chat_template_leaves_out(tmp_path: Path) -> None:
    scheduler = FakeScheduler(says(PIPELINE.eos_token_ids[0]))
    async with running(tmp_path, scheduler, template=TEMPLATE) as site:
        for path, body, name in (
            ("chat/completions", {"messages": CHAT}, "messages.content"),
            ("messages", {"messages": TURNS, "max_tokens": 3}, "messages.content"),
            ("responses", {"input": ITEMS}, "input.content"),
        ):
            for is_stream in (False, True):
                response = await site.http.post(f"/v1/{path}", json={**body, "stream": is_stream})
                assert response.status_code == 200, response.text
                assert response.headers[LEFT_OUT] == name
        silent = json.loads(json.dumps(CHAT))
        silent[1]["content"] = None
        response = await site.http.post("/v1/chat/completions", json={"messages": silent})
        assert LEFT_OUT not in response.headers
