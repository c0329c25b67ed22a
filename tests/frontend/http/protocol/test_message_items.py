"""The items of an answer are those that the model writes, in its order, however they are cut."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.generation.answer import Piece
from services.frontend.http.protocol.message_items import Grew, Item, MessageItems, whole_items
from services.frontend.request.finish_reason import FinishReason
from services.frontend.text.answer_format import AnswerFormat
from services.frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS

Items = list[tuple[str, str, str]]

CALL_A = '{"name": "find", "arguments": {"a": 1}}'
CALL_B = '{"name": "dive", "arguments": {"b": [2]}}'
HERMES = f"<think>Hm. </think>\n<tool_call>\n{CALL_A}\n</tool_call> and \n<tool_call>{CALL_B}"
TEXTS = {
    "hermes": f"{HERMES}\n</tool_call>\nLast words.",
    "llama3": f"{CALL_A}; {CALL_B} then <|python_tag|>{CALL_A} more",
    "mistral": f"Well. [TOOL_CALLS][{CALL_A}, {CALL_B}] now [TOOL_CALLS]find[ARGS]{{}} done",
}


def answers(family: str) -> MessageItems:
    tools = {"find": "", "dive": ""}
    think = REASONING_FORMATS["think"]
    written = AnswerFormat(family=TOOL_FORMATS[family], tools=tools, reasoning=think)
    return MessageItems(written.reader("request", 0))


def named(item: Item, text: str) -> tuple[str, str, str]:
    return item.kind.name, item.name, text


def streamed(family: str, pieces: Sequence[str]) -> Items:
    items, texts = answers(family), dict[Item, str]()
    for number, text in enumerate(pieces, start=1):
        reason = FinishReason.STOP if number == len(pieces) else None
        for step in items.feed(Piece(0, text, finish_reason=reason)):
            texts[step.item] = texts.get(step.item, "")
            if isinstance(step, Grew):
                texts[step.item] += step.text
    return [named(item, text) for item, text in texts.items()]


def whole(family: str, text: str) -> Items:
    piece = Piece(0, text, finish_reason=FinishReason.STOP)
    return [named(*one) for one in whole_items(answers(family), piece)]


def test_items_are_in_the_order_of_the_text() -> None:
    assert whole("hermes", TEXTS["hermes"]) == [
        ("REASONING", "", "Hm. "),
        ("CALL", "find", '{"a": 1}'),
        ("TEXT", "", " and \n"),
        ("CALL", "dive", '{"b": [2]}'),
        ("TEXT", "", "\nLast words."),
    ]


@pytest.mark.parametrize("family", TEXTS)
def test_each_place_of_a_cut_gives_the_items_of_the_whole(family: str) -> None:
    text = TEXTS[family]
    expected = whole(family, text)
    assert len(expected) > 4
    assert streamed(family, [*text]) == expected
    for cut in range(len(text)):
        assert streamed(family, [text[:cut], text[cut:]]) == expected


PARTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
    *(f"<tool_call>{CALL_A}</tool_call>", f"[TOOL_CALLS]{CALL_A}", f"<|python_tag|>{CALL_B}"),
    *(CALL_A, CALL_B, '{"name": "find"', '{"a": 1}', "[", "]", ",", ";", " ", "\n", "a"),
]


@given(
    family=st.sampled_from([*TOOL_FORMATS]),
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    data=st.data(),
)
def test_how_an_answer_is_cut_changes_no_item(
    family: str, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(family, pieces) == whole(family, text) == streamed(family, [*text, ""])
