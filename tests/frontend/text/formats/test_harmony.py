"""gpt-oss's messages: read by channel however they are cut, and made by grammars."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.frontend.request import output_format
from services.frontend.request.conversation import ChatMessage, Conversation, Tool, ToolChoice
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.harmony import MARKERS
from services.frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from services.frontend.text.message_format import MessageFormat
from services.frontend.text.message_reader import MessageReader
from tests.frontend.text.formats.checkpoint import Checkpoint
from tests.frontend.text.formats.said import Said, read

THOUGHT = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HEADER = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
BEFORE = " to=functions.find<|channel|>commentary json<|message|>"


def reader(
    *, tools: tuple[str, ...] = ("find",), has_begun: bool = False, separates: bool = True
) -> MessageReader:
    rules = CallRules(new_id="id-{}".format, tools=dict.fromkeys(tools, ""))
    inner = TOOL_FORMATS["harmony"].reader(rules)
    if not separates:
        return inner
    return REASONING_FORMATS["harmony"].reader(inner, has_begun=has_begun)


CASES: dict[str, tuple[dict[str, Any], str, Said]] = {
    "final": ({}, f"{THOUGHT}{FINAL}Hello!<|return|>", Said("Hm {.", "Hello!")),
    "call": (
        {},
        f'{THOUGHT}{HEADER}{{"a": 1}}<|call|>',
        Said("Hm {.", calls=[["find", '{"a": 1}']]),
    ),
    "recipient-first": ({}, f'{BEFORE}{{"a": 1}}', Said(calls=[["find", '{"a": 1}']])),
    "preamble": (
        {},
        f"<|channel|>commentary<|message|>Let me.<|end|><|start|>assistant{HEADER}{{}}",
        Said(content="Let me.", calls=[["find", "{}"]]),
    ),
    "call-in-analysis": (
        {},
        "<|channel|>analysis to=functions.find<|message|>{}<|call|>",
        Said(calls=[["find", "{}"]]),
    ),
    "built-in-tool": (
        {},
        f"<|channel|>analysis to=python<|message|>1+1<|end|>{FINAL}2",
        Said("1+1", "2"),
    ),
    "cut-call": ({}, f'{HEADER}{{"a": ', Said(calls=[["find", '{"a": ']], is_cut=True)),
    "cut-thought": ({}, "<|channel|>analysis<|message|>Hm", Said("Hm")),
    "cut-header": ({}, f"{THOUGHT}<|channel|>comment", Said("Hm {.")),
    "no-channels": ({}, "  Hello, to=you.", Said(content="  Hello, to=you.")),
    "not-a-header": ({}, "to=everybody, hello", Said(content="to=everybody, hello")),
    "malformed-header": (
        {},
        f"<|channel|>final<|end|>{FINAL}Hi",
        Said(content="<|channel|>final<|end|>Hi"),
    ),
    "end-is-missing": ({}, f"<|channel|>analysis<|message|>Hm{FINAL}Hi", Said("Hm", "Hi")),
    "begun": ({"has_begun": True}, f"Hm<|end|><|start|>assistant{FINAL}Hi", Said("Hm", "Hi")),
    "not-separated": ({"separates": False}, f"{THOUGHT}{FINAL}Hi", Said(content="Hm {.Hi")),
    "no-tools": ({"tools": ()}, f"{HEADER}{{}}<|call|>", Said(content="{}")),
    "near-json": ({}, f"{HEADER}{{'a': None,}}", Said(calls=[["find", "{'a': None,}"]])),
}


@pytest.mark.parametrize(("fields", "text", "said"), CASES.values(), ids=CASES.keys())
def test_messages_are_read_by_channel(fields: dict[str, Any], text: str, said: Said) -> None:
    assert read(lambda: reader(**fields), text) == said
    assert read(lambda: reader(**fields), *text) == said


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FIND = Tool(name="find", parameters=json.dumps(SCHEMA), is_strict=True)
HELLO = (ChatMessage("user", "hello"),)


@pytest.mark.parametrize("special", [(), MARKERS], ids=["text", "special"])
def test_grammars_hold_answers_to_calls_and_to_the_final_channel(
    tmp_path: Path, special: tuple[str, ...]
) -> None:
    checkpoint = Checkpoint(tmp_path, *special)
    found = MessageFormat(
        checkpoint.tokenizer, "", tool_parser="harmony", reasoning_parser="harmony"
    )

    def allowed(asked: str = "", tools: tuple[Tool, ...] = (FIND,), **choice: Any) -> list[str]:
        talk = Conversation(HELLO, tools=tools, tool_choice=ToolChoice(**choice))
        grammar = found.of(talk, (), asked=asked).grammar
        texts = {
            "call": f'{HEADER}{{"n": 1}}',
            "before": f'{BEFORE}{{"n": 1}}',
            "wrong": f'{HEADER}{{"n": "x"}}',
            "final": f'{FINAL}{{"n": 2}}',
            "words": f"{FINAL}Hello",
            "bare": '{"n": 2}',
        }
        thought = {f"thought-{name}": THOUGHT + text for name, text in texts.items()}
        return [
            name for name, text in (texts | thought).items() if checkpoint.follows(grammar, text)
        ]

    def after_thought(*names: str) -> list[str]:
        return [*names, *(f"thought-{name}" for name in names)]

    choices: list[dict[str, Any]] = [{"mode": "required"}, {"mode": "named", "name": "find"}]
    for choice in choices:
        assert allowed(**choice) == after_thought("call", "before")
    assert allowed() == after_thought("call", "before", "final", "words")
    asked = output_format.json_schema(ClientSchema(SCHEMA, "schema"))
    assert allowed(asked, tools=()) == after_thought("final")
    assert allowed(asked) == after_thought("call", "before", "final")


def test_tokens_that_end_a_turn_end_the_answer(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, *MARKERS)
    answers = MessageFormat(checkpoint.tokenizer, "<|channel|>").of(Conversation(HELLO), ())
    ids = checkpoint.tokenizer.special_tokens(("<|return|>", "<|call|>"))
    assert set(answers.end_tokens) == set(ids.values())
    assert set(answers.marks.values()) == set(MARKERS)


def test_white_space_in_a_cut_header_is_read_in_one_pass() -> None:
    text = f"<|start|>{' ' * 20_000}\u00e9"  # a pattern that goes back at each space takes hours
    said = read(lambda: TOOL_FORMATS["harmony"].reader(CallRules(new_id="id-{}".format)), text)
    assert said.content.split() == text.split()


def test_a_cut_call_that_is_left_out_leaves_the_first_whole() -> None:
    rules = CallRules(new_id="id-{}".format, tools={"find": ""}, is_single=True)
    reader = TOOL_FORMATS["hermes"].reader(rules)
    call = '<tool_call>{"name": "find", "arguments": {"n": 1}}</tool_call>'
    reader.feed(call + call[:45])
    reader.flush()
    assert (reader.n_tool_calls, reader.ends_in_call) == (1, False)
