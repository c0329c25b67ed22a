"""Calls and reasoning in what models write, as their model cards have it, wherever it is cut."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.hermes import HermesReader
from services.frontend.text.formats.llama3 import Llama3Reader
from services.frontend.text.formats.mistral import MistralReader
from services.frontend.text.formats.think import ThinkReader
from services.frontend.text.message_reader import PlainReader
from tests.frontend.text.formats.said import Readers, Said, read

NAMES = frozenset({"find", "dive"})
TOOLS = dict.fromkeys(NAMES, "")
RULES = CallRules(new_id="id-{}".format, tools=TOOLS)

HERMES: Readers = lambda: HermesReader(RULES)  # noqa: E731
LLAMA3: Readers = lambda: Llama3Reader(RULES)  # noqa: E731
MISTRAL: Readers = lambda: MistralReader(RULES)  # noqa: E731
THINK: Readers = lambda: ThinkReader(HermesReader(RULES), has_begun=False)  # noqa: E731
THINKING: Readers = lambda: ThinkReader(PlainReader(), has_begun=True)  # noqa: E731


FIND = '{"what": "whales", "n": 3}'
ONE = '{"name": "find", "arguments": ' + FIND + "}"
LLAMA = '{"name": "find", "parameters": ' + FIND + "}"

CASES: dict[str, tuple[Readers, str, Said]] = {
    "hermes": (
        HERMES,
        f"<tool_call>\n{ONE}\n</tool_call>",
        Said(calls=[["find", FIND]]),
    ),
    "hermes-parallel": (
        HERMES,
        f'Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{{"name": "dive", '
        '"arguments": {}}\n</tool_call>\n',
        Said(content="Let me see.\n", calls=[["find", FIND], ["dive", "{}"]]),
    ),
    "hermes-list": (
        HERMES,
        f"<tool_call>[{ONE}, {ONE}]</tool_call>",
        Said(calls=[["find", FIND], ["find", FIND]]),
    ),
    "hermes-arguments-first": (
        HERMES,
        f'<tool_call>{{"arguments": {FIND}, "name": "find"}}</tool_call>after',
        Said(content="after", calls=[["find", FIND]]),
    ),
    "hermes-arguments-twice": (
        HERMES,
        f'<tool_call>{{"arguments": {{"a": 1}}, "name": "find", "arguments": {FIND}}}</tool_call>',
        Said(
            content=f'<tool_call>{{"arguments": {{"a": 1}}, "name": "find", "arguments": {FIND}}}'
            "</tool_call>"
        ),
    ),
    "hermes-arguments-as-text": (
        HERMES,
        f'<tool_call>{{"name": "find", "arguments": {json.dumps(FIND)}}}</tool_call>',
        Said(calls=[["find", FIND]]),
    ),
    "hermes-no-arguments": (
        HERMES,
        '<tool_call>\n{"name": "find"}\n</tool_call>',
        Said(calls=[["find", "{}"]]),
    ),
    "hermes-cut-off": (
        HERMES,
        '<tool_call>\n{"name": "find", "arguments": {"what": "wh',
        Said(calls=[["find", '{"what": "wh']], is_cut=True),
    ),
    "hermes-in-a-fence": (
        HERMES,
        f"<tool_call>\n```json\n{ONE}\n```\n</tool_call>\n<tool_call>```\n[{ONE}]```</tool_call>.",
        Said(content=".", calls=[["find", FIND], ["find", FIND]]),
    ),
    "hermes-braces-written-twice": (
        HERMES,
        f"<tool_call>\n{{{ONE}}}\n</tool_call>",
        Said(calls=[["find", FIND]]),
    ),
    "hermes-no-call-in-a-fence": (
        HERMES,
        "<tool_call>\n```json\n[1]\n```\n</tool_call>",
        Said(content="<tool_call>\n```json\n[1]\n```\n</tool_call>"),
    ),
    "hermes-not-closed": (HERMES, f"<tool_call>\n{ONE}", Said(calls=[["find", FIND]])),
    "hermes-cut-off-early": (
        HERMES,
        '\n<tool_call>\n{"name": "fi',
        Said(content='\n<tool_call>\n{"name": "fi'),
    ),
    "hermes-malformed": (
        HERMES,
        f"<tool_call>\n<function=find>\n</tool_call>\n<tool_call>{ONE}</tool_call>",
        Said(content="<tool_call>\n<function=find>\n</tool_call>\n", calls=[["find", FIND]]),
    ),
    "hermes-brackets-in-texts": (
        HERMES,
        '<tool_call>{"name": "find", "arguments": {"a": "}\\"</tool_call>", "b": [{}]}}'
        "</tool_call>",
        Said(calls=[["find", '{"a": "}\\"</tool_call>", "b": [{}]}']]),
    ),
    "hermes-extra-brace": (
        HERMES,
        f"<tool_call>\n{ONE}}}\n</tool_call>",
        Said(calls=[["find", FIND]]),
    ),
    "hermes-extra-bracket": (
        HERMES,
        f"<tool_call>{ONE}]\n</tool_call>",
        Said(calls=[["find", FIND]]),
    ),
    "hermes-list-extra-brace": (
        HERMES,
        f"<tool_call>[{ONE}}}, {ONE}]}}</tool_call> done",
        Said(content=" done", calls=[["find", FIND], ["find", FIND]]),
    ),
    "hermes-closed-twice": (
        HERMES,
        f"<tool_call>{ONE}</tool_call></tool_call>\n</tool_call>",
        Said(calls=[["find", FIND]]),
    ),
    "hermes-words-in-the-tag": (
        HERMES,
        f"<tool_call>{ONE} so far.</tool_call>",
        Said(content="so far.", calls=[["find", FIND]]),
    ),
    "hermes-single-quotes": (
        HERMES,
        """<tool_call>{'name': 'find', 'arguments': {'a': 'it's "{ one', }}</tool_call>""",
        Said(calls=[["find", """{'a': 'it's "{ one', }"""]]),
    ),
    "hermes-comments": (
        HERMES,
        """<tool_call>{"name": "find", "arguments": {"a": 1, // it's "{\n /* "} */ # {\n}}""",
        Said(calls=[["find", """{"a": 1, // it's "{\n /* "} */ # {\n}"""]]),
    ),
    "hermes-newlines": (
        HERMES,
        '<tool_call>{"name": "find", "arguments": {"a": "one\ntwo\\d", "b": None}}</tool_call>',
        Said(calls=[["find", '{"a": "one\ntwo\\d", "b": None}']]),
    ),
    "llama-extra-brace": (LLAMA3, f"{LLAMA}}} ", Said(calls=[["find", FIND]])),
    "mistral-extra-brace": (
        MISTRAL,
        f"[TOOL_CALLS]find[ARGS]{FIND}}}[TOOL_CALLS][{ONE}}}]",
        Said(calls=[["find", FIND], ["find", FIND]]),
    ),
    "mistral-cut": (
        MISTRAL,
        '[TOOL_CALLS]find[ARGS]{"a',
        Said(calls=[["find", '{"a']], is_cut=True),
    ),
    "hermes-tag-in-text": (HERMES, "a < b <tool", Said(content="a < b <tool")),
    "llama": (LLAMA3, LLAMA, Said(calls=[["find", FIND]])),
    "llama-tag": (LLAMA3, f"<|python_tag|>{LLAMA}", Said(calls=[["find", FIND]])),
    "llama-several": (
        LLAMA3,
        f'{LLAMA}; {{"type": "function", "name": "dive", "parameters": {{}}}}',
        Said(calls=[["find", FIND], ["dive", "{}"]]),
    ),
    "llama-other-json": (
        LLAMA3,
        ' {"name": "Bob", "parameters": {}}',
        Said(content=' {"name": "Bob", "parameters": {}}'),
    ),
    "llama-text-after": (
        LLAMA3,
        f"{LLAMA}; and more",
        Said(content="; and more", calls=[["find", FIND]]),
    ),
    "llama-built-in": (
        LLAMA3,
        '<|python_tag|>search.call(query="x")',
        Said(content='<|python_tag|>search.call(query="x")'),
    ),
    "llama-text": (LLAMA3, "Hello {}", Said(content="Hello {}")),
    "mistral": (
        MISTRAL,
        f'[TOOL_CALLS] [{ONE}, {{"name": "dive", "arguments": {{}}}}]',
        Said(calls=[["find", FIND], ["dive", "{}"]]),
    ),
    "mistral-content": (
        MISTRAL,
        f"Well.[TOOL_CALLS][{ONE}]",
        Said(content="Well.", calls=[["find", FIND]]),
    ),
    "mistral-named": (
        MISTRAL,
        f"[TOOL_CALLS]find{FIND}[TOOL_CALLS]dive[CALL_ID]abcdefghi[ARGS]{{}}",
        Said(calls=[["find", FIND], ["dive", "{}"]]),
    ),
    "mistral-malformed": (
        MISTRAL,
        "[TOOL_CALLS] who knows",
        Said(content="[TOOL_CALLS] who knows"),
    ),
    "think": (
        THINK,
        f"<think>\nHm. <tool_call>?\n</think>\n\n<tool_call>\n{ONE}\n</tool_call>",
        Said(reasoning="Hm. <tool_call>?\n", calls=[["find", FIND]]),
    ),
    "think-empty": (THINK, "<think>\n\n</think>\n\nYes.", Said(content="Yes.")),
    "think-not": (THINK, "\nYes </think>.", Said(content="\nYes </think>.")),
    "think-begun": (THINKING, "Hm.</think>Yes.", Said(reasoning="Hm.", content="Yes.")),
    "think-unclosed": (THINKING, "Hm </thin", Said(reasoning="Hm </thin")),
}


@pytest.mark.parametrize(("readers", "text", "said"), CASES.values(), ids=CASES.keys())
def test_message_is_read_whole_and_character_by_character(
    readers: Readers, text: str, said: Said
) -> None:
    assert read(readers, text) == said
    assert read(readers, *text) == said


PARTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|python_tag|>", ONE, LLAMA, '{"name": ', '"find"', '"arguments": ', FIND, "find", "\\"),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        ",",
        ";",
        ":",
        " ",
        "\n",
        "a",
        "é",
        "1",
        "<",
        "</",
        '{"name": "find',
    ),
]


@pytest.mark.parametrize("readers", [HERMES, LLAMA3, MISTRAL, THINK, THINKING])
@given(parts=st.lists(st.sampled_from(PARTS), max_size=24), data=st.data())
def test_how_a_text_is_cut_changes_nothing(
    readers: Readers, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(readers, *pieces) == read(readers, text) == read(readers, *text)


@pytest.mark.parametrize("readers", [HERMES, LLAMA3, MISTRAL])
@given(st.text(st.sampled_from('<tool_call>[]{}":,nameTOOLCALS\\ \n|')))
def test_text_without_calls_is_content(readers: Readers, text: str) -> None:
    said = read(readers, text)
    if not said.calls:
        assert said.content == text


@given(
    name=st.text(min_size=1),
    arguments=st.dictionaries(
        st.text(), st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5)
    ),
    indent=st.sampled_from([None, 2]),
)
def test_arguments_arrive_as_they_were_written(name: str, arguments: object, indent: int) -> None:
    call = json.dumps({"name": name, "arguments": arguments}, indent=indent)
    text = f"<tool_call>{call}</tool_call>"
    (found,) = read(HERMES, *re.findall("(?s).{1,3}", text)).calls
    assert found[0] == name
    assert json.loads(found[1]) == arguments


def test_arguments_come_before_the_call_ends() -> None:
    reader = HERMES()
    (begun,) = reader.feed('<tool_call>\n{"name": "find", "arguments": ').tool_calls or (None,)
    assert begun is None or begun.name == "find"
    assert reader.feed('{"what": "wh').tool_calls[-1].arguments == '{"what": "wh'


def test_calls_after_the_first_are_left_out_if_one_is_wanted() -> None:
    rules = CallRules(new_id="id-{}".format, is_single=True)
    said = read(lambda: HermesReader(rules), f"<tool_call>[{ONE}, {ONE}]</tool_call> done")
    assert said == Said(content=" done", calls=[["find", FIND]])


CALLS = {
    "hermes": (HermesReader, f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{ONE}\n</tool_call>"),
    "llama": (Llama3Reader, f"{LLAMA}; {LLAMA}"),
    "llama-tag": (Llama3Reader, f"<|python_tag|>{LLAMA}; {LLAMA}<|python_tag|>{LLAMA}"),
    "mistral": (MistralReader, f"[TOOL_CALLS][{ONE}, {ONE}]"),
    "mistral-named": (MistralReader, f"[TOOL_CALLS]find[ARGS]{FIND}[TOOL_CALLS]find[ARGS]{FIND}"),
}


@pytest.mark.parametrize(("kind", "text"), CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("must_call", [False, True], ids=["may", "must"])
def test_call_that_is_cut_is_no_content_where_it_can_only_be_one(
    kind: type[HermesReader], text: str, must_call: bool
) -> None:
    rules = CallRules(new_id="id-{}".format, tools=TOOLS, must_call=must_call)
    for end in range(1, len(text)):
        said = read(lambda: kind(rules), text[:end])
        is_first = not said.calls and not must_call
        assert said.content == (text[:end] if is_first else ""), end


@pytest.mark.parametrize("must_call", [False, True], ids=["may", "must"])
def test_tag_of_reasoning_that_is_cut_is_no_content_where_calls_must_follow(
    must_call: bool,
) -> None:
    rules = CallRules(new_id="id-{}".format, tools=TOOLS, must_call=must_call)
    for text in ("<thi", "\n<", " <think"):
        said = read(
            lambda: ThinkReader(HermesReader(rules), has_begun=False, must_call=must_call), *text
        )
        assert said == Said(content="" if must_call else text)
    called = f"\n<tool_call>{ONE}</tool_call>"
    for text in (called, f"<think>Hm.</think>{called}"):
        said = read(
            lambda: ThinkReader(HermesReader(rules), has_begun=False, must_call=must_call), *text
        )
        assert (said.content, said.calls) == ("", [["find", FIND]])


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (HermesReader, f"<tool_call>{ONE}</tool_call>"),
        (Llama3Reader, f"<|python_tag|>{LLAMA}"),
        (MistralReader, f"[TOOL_CALLS][{ONE}]"),
    ],
    ids=["hermes", "llama3", "mistral"],
)
def test_content_of_a_format_has_no_calls_in_it(kind: type[HermesReader], call: str) -> None:
    rules = CallRules(new_id="id-{}".format, tools=TOOLS, is_exclusive=True)
    text = json.dumps({"a": call})
    for said in (read(lambda: kind(rules), text), read(lambda: kind(rules), *text)):
        assert said == Said(content=text)
    for said in (read(lambda: kind(rules), call, call), read(lambda: kind(rules), *call, *call)):
        assert said == Said(calls=[["find", FIND]] * 2)


def test_text_between_calls_may_end_as_a_call_begins() -> None:
    said = read(HERMES, f"<tool_call>{ONE}</tool_call> 1 <")
    assert said == Said(content=" 1 <", calls=[["find", FIND]])
    said = read(HERMES, f"<tool_call>{ONE}</tool_call><tool_call>no call")
    assert said.content == "<tool_call>no call"


@pytest.mark.parametrize("readers", [HERMES, LLAMA3, MISTRAL, THINK])
def test_reading_takes_work_in_proportion_to_the_text(readers: Readers) -> None:
    for part in ("<tool_call>", " ", '{"name": "', "[TOOL_CALLS]"):
        text = part * 5_000
        assert read(readers, *re.findall("(?s).{1,4}", text)).content == text
