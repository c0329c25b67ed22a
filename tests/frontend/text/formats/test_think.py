"""Reasoning between the tags of each format, opened by the prompt or by the model."""

import itertools
import random
from pathlib import Path

import pytest

from services.frontend.request import output_format
from services.frontend.request.conversation import ChatMessage, Conversation
from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.hermes import HermesReader
from services.frontend.text.formats.registry import REASONING_FORMATS
from services.frontend.text.message_format import MessageFormat
from services.frontend.text.message_reader import MessageReader, PlainReader
from tests.frontend.text.formats.checkpoint import Checkpoint
from tests.frontend.text.formats.said import Said, read

TAGS = {
    "think": ("<think>", "</think>"),
    "granite": ("<think>", "</think>"),
    "magistral": ("[THINK]", "[/THINK]"),
    "kimi": ("◁think▷", "◁/think▷"),
    "command": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}
MESSAGE_TAGS = {
    "granite": ("<response>", "</response>"),
    "command": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
}
TEMPLATES = {
    "granite": "Write thoughts between <think></think>, and <response></response> around the rest",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
}
NAMES = [name for name in REASONING_FORMATS if name != "harmony"]


def reader(name: str, *, has_begun: bool = False) -> MessageReader:
    return REASONING_FORMATS[name].reader(PlainReader(), has_begun=has_begun)


def read_both(name: str, text: str, *, has_begun: bool = False) -> Said:
    said = read(lambda: reader(name, has_begun=has_begun), text)
    assert read(lambda: reader(name, has_begun=has_begun), *text) == said
    return said


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_is_read_up_to_its_end(name: str) -> None:
    begin, end = TAGS[name]
    open_message, close_message = MESSAGE_TAGS.get(name, ("", ""))
    message = f"{open_message}Yes <b>.{close_message}"
    whole = Said("Hm <.\n", "Yes <b>.")
    assert read_both(name, f"{begin}Hm <.\n{end}\n\n{message}") == whole
    assert read_both(name, f"\nHm <.\n{end}{message}", has_begun=True) == whole
    assert read_both(name, message) == Said(content="Yes <b>.")
    assert read_both(name, f"{begin}{end}\n{message}") == Said(content="Yes <b>.")
    assert read_both(name, f"{end}\n{message}") == Said(content="Yes <b>.")
    assert read_both(name, f"{begin}Hm, {message}") == Said(f"Hm, {message}")
    assert read_both(name, f"Hm {end[:-1]}", has_begun=True) == Said(f"Hm {end[:-1]}")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MESSAGE_TAGS])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hm.\nEND\n\nYes.", "Hm.\nYes."),
        ("BEGINHm.END\nYes.\nEND\nYes.\nEND", "Yes.\nYes.\n"),
        ("Write END after it.\n", "Write END after it.\n"),
        ("```\nBEGIN\nHm.\nEND\n```\nand\nEND\nYes", "```\nBEGIN\nHm.\nEND\n```\nand\nYes"),
        ("so\nEND, then", "so\nEND, then"),
    ],
    ids=["unopened", "again", "mentioned", "shown", "in a line"],
)
def test_closing_tag_that_is_alone_on_its_line_is_no_content(
    name: str, text: str, content: str
) -> None:
    begin, end = TAGS[name]
    text, content = (one.replace("BEGIN", begin).replace("END", end) for one in (text, content))
    assert read_both(name, text).content == content


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_format_of_reasoning_is_found_in_the_template(tmp_path: Path, name: str) -> None:
    template = TEMPLATES.get(name) or f"{{% if x %}}{''.join(TAGS[name])}{{% endif %}}"
    found = MessageFormat(Checkpoint(tmp_path).tokenizer, template)
    assert found.reasoning == name
    assert (
        MessageFormat(Checkpoint(tmp_path).tokenizer, template, reasoning_parser="none").reasoning
        == "none"
    )


def test_tags_of_results_are_no_tags_of_messages(tmp_path: Path) -> None:
    template = "</think>{% for m in messages %}<response>{{ m.content }}</response>{% endfor %}"
    assert MessageFormat(Checkpoint(tmp_path).tokenizer, template).reasoning == "think"


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", NAMES)
def test_prompt_that_ends_inside_reasoning_is_noticed(
    tmp_path: Path, name: str, special: bool
) -> None:
    begin, end = TAGS[name]
    checkpoint = Checkpoint(
        tmp_path, *((begin.strip().removesuffix("thought"), end) if special else ())
    )
    found = MessageFormat(checkpoint.tokenizer, "", reasoning_parser=name)

    def is_thinking(prompt: str, begun: str | None = None) -> bool:
        tokens = checkpoint.tokenizer.to_tokens(prompt + (begun or ""))
        last = () if begun is None else (ChatMessage("assistant", begun),)
        talk = Conversation(
            (ChatMessage("user", "hello"), *last),
            continues_last=begun is not None,
            adds_generation_prompt=begun is None,
        )
        return found.of(talk, tokens).is_thinking

    assert is_thinking(f"a{begin}")
    assert is_thinking(f"a{begin}\n")
    assert not is_thinking("a")
    assert not is_thinking(f"a{begin}b{end}\n\n")
    assert not is_thinking(f"say {begin} now<|user|>")
    long = "The whales are many. " * 9
    assert is_thinking("a", f"{begin}{long}")
    assert is_thinking(f"a{begin}", long)
    assert not is_thinking("a", f"{begin}{long}{end}Yes")
    assert not is_thinking("a", long)


@pytest.mark.parametrize("name", [*MESSAGE_TAGS, "gemma4"])
def test_asked_format_stands_between_the_tags_of_the_message(tmp_path: Path, name: str) -> None:
    open_message, close_message = MESSAGE_TAGS.get(name, ("", ""))
    begin, end = TAGS[name]
    special = (open_message, close_message, begin.removesuffix("thought\n"), end)
    checkpoint = Checkpoint(tmp_path, *filter(None, special))
    found = MessageFormat(checkpoint.tokenizer, "", reasoning_parser=name)
    talk = Conversation((ChatMessage("user", "hello"),))
    grammar = found.of(talk, (), asked=output_format.choice(["yes"])).grammar
    reply = f"{open_message}yes{close_message}"
    assert checkpoint.follows(grammar, reply)
    assert checkpoint.follows(grammar, f"{begin}Hm{end}{reply}")
    assert not checkpoint.follows(grammar, f"{begin}Hm{end}{open_message}no{close_message}")


def test_calls_are_read_after_reasoning_of_another_family() -> None:
    rules = CallRules(new_id="id-{}".format, tools={"find": ""})
    text = '[THINK]Hm[/THINK]<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    said = read(
        lambda: REASONING_FORMATS["magistral"].reader(HermesReader(rules), has_begun=False), *text
    )
    assert said == Said("Hm", calls=[["find", "{}"]])


def test_words_on_both_sides_of_a_tag_that_is_left_out_have_their_own_positions() -> None:
    """The beginning of a mark of calls waits before the tag, and is content behind it."""

    def thinking() -> MessageReader:
        rest = HermesReader(CallRules(new_id="id-{}".format))
        return REASONING_FORMATS["granite"].reader(rest, has_begun=False)

    assert read(thinking, "<response>one <", "</response>", "\ntwo").content == "one <\ntwo"


@pytest.mark.parametrize("seed", range(20))
def test_positions_count_the_tags_that_are_left_out(seed: int) -> None:
    """`read` compares each character of the message with the character at its position."""
    dice = random.Random(seed)
    parts = (
        "<think>",
        "</think>",
        "\n</think>\n",
        "a",
        "a",
        "\n",
        "<tool",
        "<tool_call>",
        "<",
        " ",
    )
    text = "<think>a</think>" + "".join(dice.choices(parts, k=12))
    cuts = sorted(dice.choices(range(len(text) + 1), k=6))
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]

    def thinking() -> MessageReader:
        rest = HermesReader(CallRules(new_id="id-{}".format))
        return REASONING_FORMATS["think"].reader(rest, has_begun=False)

    assert read(thinking, *pieces) == read(thinking, text)
