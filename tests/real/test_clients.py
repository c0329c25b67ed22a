"""Clients that people use, unmodified and in an environment of their own, with a checkpoint that
talks."""

import json
from pathlib import Path

from tests.real.conftest import MODEL, Clients
from tests.system.stack import Stack

PARIS = "The capital of France is Paris."
N_BENCHMARKED = 12


def test_litellm_chats_and_completes(clients: Clients, two_stages: Stack) -> None:
    assert clients.case("litellm", "completion", two_stages) == {
        "whole": PARIS,
        "streamed": PARIS,
        "tokens": 8,
    }
    assert clients.case("litellm", "text", two_stages).startswith(" Paris.")


def test_litellm_sends_its_own_message_back(clients: Clients, two_stages: Stack) -> None:
    second, third = clients.case("litellm", "own_message", two_stages)
    assert second
    assert second == third


def test_langchain_invokes_and_streams(clients: Clients, two_stages: Stack) -> None:
    assert clients.case("langchain", "invoke", two_stages) == PARIS
    streamed = clients.case("langchain", "stream", two_stages)
    assert (streamed["text"], streamed["tokens"]) == (PARIS, 8)
    assert streamed["n_pieces"] > 3


def test_langchain_gets_answers_of_a_schema(clients: Clients, two_stages: Stack) -> None:
    city = clients.case("langchain", "structured", two_stages)
    assert list(city) == ["name", "is_capital"]
    assert city["name"] in ("Paris", "Rome")


def test_langchain_in_a_tool_loop_of_two_turns(clients: Clients, two_stages: Stack) -> None:
    loop = clients.case("langchain", "tool_loop", two_stages)
    [call] = loop["calls"]
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    assert loop["answer"]
    calls = clients.case("langchain", "streamed_call", two_stages)
    assert calls
    for called in calls:  # a model that must call may call more than once
        assert called["name"] == "get_weather"
        assert called["args"]["city"] in ("Paris", "Rome")


def test_anthropic_creates_and_streams_messages(clients: Clients, two_stages: Stack) -> None:
    assert clients.case("anthropic", "create", two_stages) == {
        "text": PARIS,
        "reason": "end_turn",
        "tokens": 8,
    }
    streamed = clients.case("anthropic", "stream", two_stages)
    assert streamed["text"] == streamed["whole"]
    assert streamed["text"]


def test_anthropic_streams_a_tool_call(clients: Clients, two_stages: Stack) -> None:
    loop = clients.case("anthropic", "tool_loop", two_stages)
    assert {"content_block_start", "content_block_delta", "message_stop"} <= set(loop["events"])
    assert (loop["name"], loop["reason"]) == ("get_weather", "tool_use")
    assert loop["input"]["city"] in ("Paris", "Rome")
    assert loop["answer"]


def test_llm_prompts_streams_and_keeps_schemas(clients: Clients, two_stages: Stack) -> None:
    directory = clients.home / "llm"
    directory.mkdir()
    models = f"""
- model_id: {MODEL}
  model_name: {MODEL}
  api_base: {two_stages.http}/v1
  supports_schema: true
"""
    (directory / "extra-openai-models.yaml").write_text(models)
    ask = ("llm", "prompt", "-m", MODEL, "-o", "temperature", "0", "-o", "max_tokens", "64")
    question = "What is the capital of France?"
    assert clients.run(*ask, question).strip() == PARIS
    assert clients.run(*ask, "--no-stream", question).strip() == PARIS
    city = {
        "type": "object",
        "properties": {"name": {"enum": ["Paris", "Rome"]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    answer = json.loads(clients.run(*ask, "--schema", json.dumps(city), question))
    assert answer["name"] in ("Paris", "Rome")


def test_guidellm_benchmarks_with_its_defaults(
    clients: Clients, two_stages: Stack, with_tools: Path
) -> None:
    report = clients.home / "guidellm.json"
    clients.run(
        "guidellm",
        "run",
        f"--backend=kind=openai_http,target={two_stages.http}",
        "--profile=kind=concurrent,streams=4",
        "--data=kind=synthetic_text,prompt_tokens=24,output_tokens=8",
        f"--tokenizer=kind=huggingface_auto,model={with_tools}",
        f"--constraint=kind=max_requests,count={N_BENCHMARKED}",
        f"--output=kind=json,path={report}",
        "--disable-console",
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (N_BENCHMARKED, 0)
    generated = {
        request["output_metrics"]["text_tokens"] for request in benchmark["requests"]["successful"]
    }
    assert generated == {8}
