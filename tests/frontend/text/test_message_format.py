"""The format of a checkpoint's messages is found, and its grammars make what its readers read."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from services.common import errors
from services.frontend.model_settings import ReasoningParser, ToolParser
from services.frontend.request import output_format
from services.frontend.request.conversation import ChatMessage, Conversation, Tool, ToolChoice
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.text.formats.harmony import HarmonyReader
from services.frontend.text.formats.hermes import HermesReader
from services.frontend.text.formats.llama3 import Llama3Reader
from services.frontend.text.formats.mistral import MistralReader
from services.frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from services.frontend.text.formats.think import ThinkReader
from services.frontend.text.incremental_text import IncrementalText
from services.frontend.text.message_format import MessageFormat
from services.frontend.text.message_reader import MessageDelta, PlainReader
from tests.frontend import chat_templates
from tests.frontend.text.formats.checkpoint import Checkpoint

SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"]
HELLO = (ChatMessage("user", "hello"),)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FIND = Tool(name="find", parameters=json.dumps(SCHEMA))
DIVE = Tool(name="dive")


def conversation(*tools: Tool, **choice: Any) -> Conversation:
    return Conversation(HELLO, tools=tools, tool_choice=ToolChoice(**choice))


# gpt-oss's way to call tools and to think, in short.
HARMONY = "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"


@pytest.mark.parametrize(
    ("template", "special", "reader"),
    [
        (chat_templates.HERMES, (), ThinkReader),
        (chat_templates.HERMES.replace("</think>", ""), (), HermesReader),
        (chat_templates.LLAMA3, (), Llama3Reader),
        (chat_templates.LLAMA3.replace("<|python_tag|>", ""), ("<|python_tag|>",), Llama3Reader),
        (chat_templates.MISTRAL, (), MistralReader),
        ("{{ tools }}", ("[TOOL_CALLS]",), MistralReader),
        (chat_templates.SMOLLM2, (), PlainReader),
        (HARMONY, (), HarmonyReader),
        ("{{ tools }}", ("<|channel|>", "<|message|>", "<|call|>"), HarmonyReader),
    ],
    ids=[
        "qwen3",
        "qwen2",
        "llama3.1",
        "llama3.2",
        "mistral",
        "mistral-token",
        "unknown",
        "gpt-oss",
        "gpt-oss-tokens",
    ],
)
def test_format_is_found_in_the_checkpoint(
    tmp_path: Path, template: str, special: tuple[str, ...], reader: type[object]
) -> None:
    tokenizer = Checkpoint(tmp_path, *special).tokenizer
    found = MessageFormat(tokenizer, template)
    answers = found.of(conversation(FIND), ())
    assert type(answers.reader("request", 0)) is reader


UNKNOWN_TEMPLATE = "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def test_a_format_that_is_not_known_is_plain_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = MessageFormat(Checkpoint(tmp_path).tokenizer, UNKNOWN_TEMPLATE)
    (record,) = caplog.records
    assert "no known format of tool calls" in record.message
    reader = found.of(conversation(FIND), ()).reader("request", 0)
    with pytest.raises(errors.InvalidRequest, match="no format of tool calls is known"):
        found.of(conversation(FIND, mode="required"), ())
    text = '<call>find{"place": "here"}</call> <think>'
    deltas = [reader.feed(text[i : i + 7]) for i in range(0, len(text), 7)]
    delta = sum([*deltas, reader.flush()], MessageDelta())
    assert (delta.content, delta.reasoning, delta.tool_calls) == (text, "", ())


def test_answers_are_plain_without_tools_or_where_none_may_be_called(tmp_path: Path) -> None:
    found = MessageFormat(Checkpoint(tmp_path).tokenizer, chat_templates.LLAMA3)
    parsers_off = MessageFormat(
        Checkpoint(tmp_path).tokenizer,
        chat_templates.HERMES,
        tool_parser="none",
        reasoning_parser="none",
    )
    for answers in (
        found.of(conversation(), ()),
        found.of(conversation(FIND, mode="none"), ()),
        parsers_off.of(conversation(FIND), ()),
    ):
        assert isinstance(answers.reader("request", 0), PlainReader)
    with pytest.raises(errors.InvalidRequest) as caught:
        parsers_off.of(conversation(FIND, mode="required"), ())
    assert caught.value.field == "tool_choice"


def test_mark_before_content_is_read_and_asked_for_without_tools_too(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    found = MessageFormat(checkpoint.tokenizer, "{{ '>>>all\\n' }}>>>")
    for talk in (conversation(), conversation(FIND, mode="none")):
        reader = found.of(talk, ()).reader("request", 0)
        delta = reader.feed("all\nHi>>>find\n{}") + reader.flush()
        assert (delta.content, delta.tool_calls) == ("Hi>>>find\n{}", ())
    for talk in (conversation(), conversation(FIND)):
        answers = found.of(talk, (), asked=output_format.choice(["yes"]))
        assert checkpoint.follows(answers.grammar, "all\nyes")
        assert not checkpoint.follows(answers.grammar, "all\nno")
        assert checkpoint.follows(answers.grammar, 'find\n{"n": 1}') is bool(talk.tools)
        reader = answers.reader("request", 0)
        assert (reader.feed("all\nyes>>>find") + reader.flush()).content == "yes>>>find"


def test_prompt_that_opens_the_reasoning_is_noticed(tmp_path: Path) -> None:
    tokenizer = Checkpoint(tmp_path, "<think>", "</think>").tokenizer
    found = MessageFormat(tokenizer, "</think>")
    for end, is_thinking in (("a<think>\n", True), ("a", False), ("<think>\n\n</think>\n", False)):
        token_ids = tokenizer.to_tokens(end)
        assert found.of(conversation(), token_ids).is_thinking is is_thinking


def test_ids_of_calls_are_the_same_each_time(tmp_path: Path) -> None:
    for template, length in ((chat_templates.LLAMA3, 29), (chat_templates.MISTRAL, 9)):
        found = MessageFormat(Checkpoint(tmp_path).tokenizer, template)
        answers = found.of(conversation(FIND), ())
        text = (
            "[TOOL_CALLS]find{}"
            if template == chat_templates.MISTRAL
            else ('{"name": "find", "parameters": {}}')
        )
        ids = set()
        for index in (0, 1, 0):
            (call,) = (answers.reader("r", index).feed(text) + MessageDelta()).tool_calls
            ids.add(call.id)
            assert len(call.id) == length
        assert len(ids) == 2


ONE = '{"name": "find", "arguments": {"n": 12}}'
OTHER = '{"name": "dive", "arguments": {"a": 1, "b": [2]}}'
WRONG = '{"name": "find", "arguments": {"n": "12"}}'
UNKNOWN = '{"name": "swim", "arguments": {}}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def listed(*calls: str) -> str:
    return f"[TOOL_CALLS][{', '.join(calls)}]"


def with_parameters(*calls: str) -> str:
    return "; ".join(call.replace('"arguments"', '"parameters"') for call in calls)


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize(
    ("parser", "written"),
    [("hermes", tagged), ("llama3", with_parameters), ("mistral", listed)],
    ids=["hermes", "llama3", "mistral"],
)
def test_grammar_makes_calls_that_the_reader_reads(
    tmp_path: Path, special: tuple[str, ...], parser: Any, written: Any
) -> None:
    if special and parser == "mistral":
        special = ("[TOOL_CALLS]",)
    checkpoint = Checkpoint(tmp_path, *special)
    found = MessageFormat(checkpoint.tokenizer, "", tool_parser=parser)

    def grammar(**choice: Any) -> str:
        return found.of(conversation(FIND, DIVE, **choice), ()).grammar

    assert grammar(mode="auto") == ""
    cases: dict[str, list[tuple[str, ...]]] = {
        grammar(mode="required"): [(ONE,), (OTHER,), (ONE, OTHER)],
        grammar(mode="required", allows_parallel=False): [(ONE,), (OTHER,)],
        grammar(mode="named", name="find"): [(ONE,)],
    }
    possible: list[tuple[str, ...]] = [
        (ONE,),
        (OTHER,),
        (ONE, OTHER),
        (WRONG,),
        (UNKNOWN,),
        (ONE, WRONG),
    ]
    for made, allowed in cases.items():
        for calls in possible:
            assert checkpoint.follows(made, written(*calls)) is (calls in allowed)
        for text in ("", "hello", "{", written(ONE) + "!"):
            assert not checkpoint.follows(made, text)
    answers = found.of(conversation(FIND, DIVE), ())
    reader = answers.reader("request", 0)
    said = reader.feed(written(ONE, OTHER)) + reader.flush()
    assert [(call.name, call.arguments) for call in said.tool_calls] == [
        ("find", '{"n": 12}'),
        ("dive", '{"a": 1, "b": [2]}'),
    ]
    assert said.content == ""


def test_grammar_of_newer_mistral_names_the_tool_first(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, *SPECIAL)
    found = MessageFormat(checkpoint.tokenizer, "", tool_parser="mistral")
    made = found.of(conversation(FIND, DIVE, mode="required"), ()).grammar
    one, wrong = '[TOOL_CALLS]find[ARGS]{"n": 1}', '[TOOL_CALLS]find[ARGS]{"n": "1"}'
    assert checkpoint.follows(made, one)
    assert checkpoint.follows(made, one + "[TOOL_CALLS]dive[ARGS]{}")
    assert not checkpoint.follows(made, wrong)
    assert not checkpoint.follows(made, one + wrong)


@pytest.mark.parametrize("special", [(), SPECIAL[:1] + SPECIAL[2:]], ids=["text", "special"])
@pytest.mark.parametrize(
    ("parser", "written", "speaks_before"),
    [("hermes", tagged, True), ("llama3", with_parameters, False), ("mistral", listed, True)],
    ids=["hermes", "llama3", "mistral"],
)
def test_strict_tools_keep_their_schema_where_the_model_may_choose(
    tmp_path: Path, special: tuple[str, ...], parser: Any, written: Any, speaks_before: bool
) -> None:
    checkpoint = Checkpoint(tmp_path, *special)
    found = MessageFormat(checkpoint.tokenizer, "", tool_parser=parser)
    strict = Tool(name="find", parameters=FIND.parameters, is_strict=True)
    made = found.of(conversation(strict, DIVE), ())
    assert made.grammar_field == "tools"
    for text in ("", "hello", "[1] < 2", written(ONE), written(ONE, OTHER)):
        assert checkpoint.follows(made.grammar, text), text
    assert checkpoint.follows(made.grammar, "Well: " + written(ONE))
    assert not checkpoint.follows(made.grammar, written(WRONG))
    assert not checkpoint.follows(made.grammar, written(UNKNOWN))
    if speaks_before:
        assert not checkpoint.follows(made.grammar, "Well: " + written(WRONG))


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["text", "special"])
def test_calls_that_are_required_come_after_the_reasoning(
    tmp_path: Path, special: tuple[str, ...]
) -> None:
    checkpoint = Checkpoint(tmp_path, *special)
    found = MessageFormat(checkpoint.tokenizer, "", tool_parser="hermes", reasoning_parser="think")
    opened = checkpoint.library.encode("<think>\n", add_special_tokens=False).ids
    asked = conversation(FIND, mode="required")
    inside = found.of(asked, opened).grammar
    outside = found.of(asked, ()).grammar
    thought = f"Hm {{}}.\n</think>\n\n{tagged(ONE)}"
    assert checkpoint.follows(inside, thought)
    assert not checkpoint.follows(inside, tagged(ONE))
    assert checkpoint.follows(outside, f"<think>{thought}")
    assert checkpoint.follows(outside, tagged(ONE))
    assert not checkpoint.follows(outside, f"<think>Hm</think>{tagged(WRONG)}")


OTHER_TEXT = '{"n": 7}'
OPEN = {"type": "object", "additionalProperties": True}


def of_schema(schema: dict[str, Any]) -> str:
    return output_format.json_schema(ClientSchema(schema, "asked"))


@pytest.mark.parametrize("special", [(), SPECIAL[:1] + SPECIAL[2:]], ids=["text", "special"])
@pytest.mark.parametrize(
    "asked",
    [
        of_schema(SCHEMA),
        output_format.regex(r'\{"n": \d\}'),
        output_format.choice([OTHER_TEXT]),
        output_format.json_object(),
        of_schema({"properties": {"name": {"const": "x"}}, **OPEN}),
    ],
    ids=["schema", "regex", "choice", "object", "names"],
)
@pytest.mark.parametrize(
    ("parser", "written"),
    [("hermes", tagged), ("llama3", with_parameters), ("mistral", listed)],
    ids=["hermes", "llama3", "mistral"],
)
def test_answers_either_call_tools_or_have_the_format_that_is_asked_for(
    tmp_path: Path, special: tuple[str, ...], parser: Any, written: Any, asked: str
) -> None:
    checkpoint = Checkpoint(tmp_path, *special)
    found = MessageFormat(checkpoint.tokenizer, "", tool_parser=parser, reasoning_parser="think")
    strict = Tool(name="find", parameters=FIND.parameters, is_strict=True)
    if parser == "llama3" and '"json_schema":{' not in asked:
        with pytest.raises(errors.InvalidRequest) as caught:
            found.of(conversation(strict), (), asked=asked, asked_field="regex")
        assert caught.value.field == "regex"
        return
    has_any_object = parser == "llama3" and asked == output_format.json_object()
    opened = checkpoint.library.encode("<think>\n", add_special_tokens=False).ids
    thought = "<think>Hm {}.</think>\n\n"
    for tools in ((), (strict, DIVE)):
        outside = found.of(conversation(*tools), (), asked=asked, asked_field="regex")
        inside = found.of(conversation(*tools), opened, asked=asked).grammar
        assert outside.grammar_field == "regex"
        for text, may_be in (
            (OTHER_TEXT, True),
            (written(ONE), bool(tools) or has_any_object),
            (written(ONE, OTHER), bool(tools)),
            (written(WRONG), has_any_object),
            ("hello", False),
            (written(ONE) + OTHER_TEXT, False),
        ):
            assert checkpoint.follows(outside.grammar, text) is may_be
            assert checkpoint.follows(outside.grammar, thought + text) is may_be
            assert checkpoint.follows(inside, thought.removeprefix("<think>") + text) is may_be
            assert not checkpoint.follows(inside, text)
    reader = outside.reader("request", 0)
    said = reader.feed(thought + written(ONE, OTHER)) + reader.flush()
    assert (said.reasoning, said.content, len(said.tool_calls)) == ("Hm {}.", "", 2)


def test_format_is_the_clients_own_grammar_where_nothing_comes_before_it(tmp_path: Path) -> None:
    found = MessageFormat(Checkpoint(tmp_path).tokenizer, "", tool_parser="hermes")
    for asked in (conversation(), conversation(FIND, mode="none")):
        answers = found.of(asked, (), asked=output_format.json_object())
        assert answers.grammar == ""
        assert isinstance(answers.reader("request", 0), PlainReader)


@pytest.mark.parametrize(
    "schema", ['{"type": "string"}', "[]", '{"type": ["object", "null"]}', "{"], ids=str
)
def test_arguments_are_objects(tmp_path: Path, schema: str) -> None:
    found = MessageFormat(Checkpoint(tmp_path).tokenizer, "", tool_parser="hermes")
    with pytest.raises(errors.InvalidRequest) as caught:
        found.of(
            conversation(DIVE, Tool(name="a", parameters=schema), mode="required"),
            (),
        )
    assert caught.value.field == "tools.1.function.parameters"


def test_special_tokens_that_mark_calls_have_text_where_they_are_wanted(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, *SPECIAL)
    found = MessageFormat(checkpoint.tokenizer, "", tool_parser="mistral")
    answers = found.of(conversation(FIND), ())
    tokens = checkpoint.library.encode("hé[TOOL_CALLS]find[ARGS]{}<|python_tag|>!").ids
    for marks, text in ((answers.marks, "hé[TOOL_CALLS]find[ARGS]{}!"), ({}, "héfind{}!")):
        read = IncrementalText(checkpoint.tokenizer, marks=marks)
        assert "".join(map(read.feed, tokens)) + read.flush() == text
    assert found.of(conversation(), ()).marks == {}
    cut = checkpoint.library.encode("é").ids[1:2] + checkpoint.library.encode("[ARGS]").ids[1:]
    read = IncrementalText(checkpoint.tokenizer, marks=answers.marks)
    assert "".join(map(read.feed, cut)) == "\ufffd[ARGS]"


def test_settings_have_the_names_of_all_formats() -> None:
    for names, formats in ((ToolParser, TOOL_FORMATS), (ReasoningParser, REASONING_FORMATS)):
        assert get_args(names) == ("auto", "none", *formats)
