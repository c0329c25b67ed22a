"""Answers become messages: the assistant's message is read out of the text, whole or in pieces."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from orcinus.v1 import inference_pb2

from services.common.sampling import SamplingParams
from services.frontend.generation.answer import Piece
from services.frontend.generation.encoded_prompt import EncodedPrompt
from services.frontend.generation.generation import Generation, TokenUsage
from services.frontend.grpc.answers import AnswerMessages
from services.frontend.request.conversation import Conversation, ToolChoice
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import GenerationOptions, Prompt
from services.frontend.text.message_reader import (
    CallDelta,
    MessageDelta,
    MessageReader,
    Part,
    Words,
)

STOP, LENGTH, TOOL_CALLS = (
    inference_pb2.FINISH_REASON_STOP,
    inference_pb2.FINISH_REASON_LENGTH,
    inference_pb2.FINISH_REASON_TOOL_CALLS,
)


class Shouts:
    """A reader of an invented format: capitals are thoughts, digits begin calls whose arguments are
    the signs that follow, and a "+" is held back until the next character."""

    ends_in_call = False

    def __init__(self) -> None:
        self.n_tool_calls = 0
        self._held = ""

    def leave_out(self, n_characters: int) -> None:
        raise NotImplementedError

    def feed(self, text: str) -> MessageDelta:
        text, self._held = self._held + text, ""
        if text.endswith("+"):
            text, self._held = text[:-1], "+"
        calls: list[Part] = []
        for character in text:
            if character.isdigit():
                call_id = f"id-{character}"
                calls.append(CallDelta(index=self.n_tool_calls, id=call_id, name=character))
                self.n_tool_calls += 1
            elif self.n_tool_calls and not character.isalpha():
                calls.append(CallDelta(index=self.n_tool_calls - 1, arguments=character))
        thought, said = "".join(filter(str.isupper, text)), "".join(filter(str.islower, text))
        return MessageDelta((Words(thought, is_reasoning=True), Words(said), *calls))

    def flush(self) -> MessageDelta:
        return MessageDelta((Words(self._held),))


@dataclass
class FakeGeneration:
    """What a shape asks of a generation."""

    prompts: Sequence[EncodedPrompt]
    options: GenerationOptions
    so_far: dict[int, str] = field(default_factory=dict)
    is_resumed: bool = False
    request_id: str = "r"
    model: str = "m"
    unenforced: Sequence[str] = ()
    usage: TokenUsage = field(default_factory=lambda: TokenUsage(1, 2))

    @property
    def n_answers(self) -> int:
        return len(self.prompts) * self.options.n

    def is_new(self, index: int) -> bool:
        return index not in self.so_far

    def prompt_text(self, index: int) -> str:
        return f"<{index // self.options.n}>"

    def prompt_of(self, index: int) -> EncodedPrompt:
        return self.prompts[index // self.options.n]

    def message_reader(self, index: int) -> MessageReader:
        reader = Shouts()
        reader.feed(self.so_far.get(index, ""))
        return reader


def generation(*prompts: Prompt, **given: Any) -> FakeGeneration:
    options = {item.name for item in dataclasses.fields(GenerationOptions)}
    made = GenerationOptions(
        sampling=SamplingParams(seed=7), **{k: v for k, v in given.items() if k in options}
    )
    encoded = tuple(EncodedPrompt(prompt, (5, 6), 9, ()) for prompt in prompts)
    rest = {name: value for name, value in given.items() if name not in options}
    return FakeGeneration(encoded, made, **rest)


def answers_of(fake: FakeGeneration, **request: Any) -> AnswerMessages:
    return AnswerMessages(cast(Generation, fake), inference_pb2.GenerateStreamRequest(**request))


CHAT = Conversation(())
TEXT = "HMabc1+{}2[]de"


def read_whole(
    text: str, reason: FinishReason, prompt: Conversation = CHAT
) -> inference_pb2.Choice:
    (choice,) = answers_of(generation(prompt)).whole([Piece(0, text, (), reason)]).choices
    return choice


def test_a_whole_answer_has_thoughts_words_and_calls() -> None:
    choice = read_whole(TEXT, FinishReason.STOP)
    assert choice.reasoning_content == "HM"
    assert choice.text == "abcde"
    assert list(choice.tool_calls) == [
        inference_pb2.ToolCall(index=0, id="id-1", name="1", arguments="+{}"),
        inference_pb2.ToolCall(index=1, id="id-2", name="2", arguments="[]"),
    ]
    assert choice.finish_reason == TOOL_CALLS


@pytest.mark.parametrize(
    ("text", "reason", "shown"),
    [
        ("abc", FinishReason.STOP, STOP),
        ("a1{", FinishReason.STOP, TOOL_CALLS),
        ("a1{", FinishReason.LENGTH, LENGTH),
    ],
    ids=["no call", "call", "cut call"],
)
def test_an_answer_with_calls_that_stopped_ends_with_them(
    text: str, reason: FinishReason, shown: inference_pb2.FinishReason
) -> None:
    assert read_whole(text, reason).finish_reason == shown


def test_the_call_of_a_named_tool_just_stops() -> None:
    named = Conversation((), tool_choice=ToolChoice(mode="named", name="1"))
    assert read_whole("1{}", FinishReason.STOP, named).finish_reason == STOP


@pytest.mark.parametrize("size", [1, 2, 3, len(TEXT)])
def test_pieces_add_up_to_the_whole_answer(size: int) -> None:
    answers, got = answers_of(generation(CHAT)), inference_pb2.Choice()
    ends = range(0, len(TEXT), size)
    pieces = [Piece(0, TEXT[at : at + size]) for at in ends]
    pieces.append(Piece(0, "", (), FinishReason.STOP))
    for message in map(answers.streamed, pieces):
        if message is None:
            continue
        choice = message.choice
        got.text += choice.text
        got.reasoning_content += choice.reasoning_content
        got.finish_reason = choice.finish_reason
        for call in choice.tool_calls:
            while len(got.tool_calls) <= call.index:
                got.tool_calls.add(index=call.index)
            whole = got.tool_calls[call.index]
            whole.id, whole.name = whole.id + call.id, whole.name + call.name
            whole.arguments += call.arguments
    assert got == read_whole(TEXT, FinishReason.STOP)


def test_what_is_held_back_comes_with_the_end_and_makes_no_message_before() -> None:
    answers = answers_of(generation(CHAT))
    assert answers.streamed(Piece(0, "+")) is None
    last = answers.streamed(Piece(0, "", (), FinishReason.LENGTH))
    assert last is not None
    assert (last.choice.text, last.seed) == ("+", 7)


def test_tokens_make_a_message_even_where_their_text_is_held_back() -> None:
    answers = answers_of(generation(CHAT, return_token_ids=True))
    first = answers.streamed(Piece(0, "+", (9,)))
    assert first is not None
    assert list(first.choice.token_ids) == [9]
    assert list(first.prompt_token_ids) == [5, 6]


def test_a_resumed_answer_goes_on_inside_a_call() -> None:
    resumed = generation(CHAT, so_far={0: "ab1{+"}, is_resumed=True, return_token_ids=True)
    answers = answers_of(resumed)
    message = answers.streamed(Piece(0, "}", (9,)))
    assert message is not None
    calls = message.choice.tool_calls
    assert "".join(call.arguments for call in calls) == "+}"
    assert all((call.index, call.id, call.name) == (0, "", "") for call in calls)
    assert not message.HasField("seed")
    assert not message.prompt_token_ids
    last = answers.streamed(Piece(0, "", (), FinishReason.STOP))
    assert last is not None
    assert last.choice.finish_reason == TOOL_CALLS


def test_answers_have_readers_of_their_own() -> None:
    answers = answers_of(generation(CHAT, n=2))
    pieces = [Piece(0, "1"), Piece(1, "a"), Piece(1, "", (), FinishReason.STOP)]
    last = [answers.streamed(piece) for piece in pieces][-1]
    assert last is not None
    assert last.choice.finish_reason == STOP


def test_text_that_continues_no_conversation_is_not_read() -> None:
    (choice,) = answers_of(generation("x")).whole([Piece(0, TEXT, (), FinishReason.STOP)]).choices
    assert choice == inference_pb2.Choice(text=TEXT, finish_reason=STOP)


def test_an_echo_comes_once_before_each_answer_that_is_new() -> None:
    fake = generation("x", (5, 6), n=2, so_far={1: "b"}, is_resumed=True)
    options = inference_pb2.GenerationOptions(echo=True)
    answers = answers_of(fake, options=options, prompts=[inference_pb2.Prompt(text="x")] * 2)
    texts = {index: "" for index in range(4)}
    for index in (0, 1, 3, 2, 3, 0):
        message = answers.streamed(Piece(index, "a"))
        assert message is not None
        texts[index] += message.choice.text
    assert texts == {0: "<0>aa", 1: "a", 2: "<1>a", 3: "<1>aa"}
