"""Log-probabilities of a chat: those of the content's tokens, also where text is held back."""

import itertools
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import TokenUsage
from services.frontend.generation.token_scores import TokenScores
from services.frontend.http.openai.chat_reply import ChatReply
from services.frontend.http.openai.reply import ReplyOptions
from services.frontend.http.protocol.json_text import to_json
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import GenerationOptions
from services.frontend.request.logprobs import Logprobs
from services.frontend.request.request_id import new_request_id
from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.hermes import Hermes
from services.frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from services.frontend.text.message_reader import MessageReader, PlainReader

CALL = ["hi ", "<tool", "_call>", '{"name":"f",', '"arguments":{}}', "</tool_call>"]


@dataclass
class FakeGeneration:
    """What a reply asks of a generation."""

    reader: MessageReader
    request_id: str = field(default_factory=new_request_id)
    model: str = "m"
    n_answers: int = 1
    usage: TokenUsage = field(default_factory=lambda: TokenUsage(1, 1))
    options: GenerationOptions = field(default_factory=lambda: GenerationOptions(n_logprobs=0))
    token_texts: Any = field(
        default_factory=lambda: SimpleNamespace(text=str, to_bytes=lambda _: b"x")
    )

    def message_reader(self, _: int) -> MessageReader:
        return self.reader

    def keep(self, n_bytes: int) -> None:
        pass

    def n_shown(self, piece: Piece) -> int:
        return 0 if piece.scores is None else len(piece.scores.token_ids)

    def prompt_of(self, _: int) -> Any:
        return SimpleNamespace(prompt="x")


def hermes() -> MessageReader:
    return Hermes().reader(CallRules(new_id=str))


def thinking() -> MessageReader:
    return REASONING_FORMATS["think"].reader(hermes(), has_begun=False)


def harmony() -> MessageReader:
    reader = TOOL_FORMATS["harmony"].reader(CallRules(new_id=str, tools={"f": ""}))
    return REASONING_FORMATS["harmony"].reader(reader, has_begun=False)


HARMONY = [
    "<|channel|>",
    "analysis",
    "<|message|>",
    "an",
    " a",
    "<|end|>",
    "<|start|>",
    "assistant",
]
HARMONY += ["<|channel|>", "final", "<|message|>", "an", " a", "<|return|>"]

ANSWERS = {
    "plain": (PlainReader, ["a", "", "\N{GRINNING FACE}", "b"], [0, 1, 2, 3]),
    "call": (hermes, CALL, [0]),
    "held back and said": (hermes, ["a", "<tool", "_cal", "m>", "<tool"], [0, 1, 2, 3, 4]),
    "words between calls": (hermes, [*CALL[1:], "\n", "hi", "</", "b>"], [5, 6, 7, 8]),
    "thought": (thinking, ["<think>", "\n", "hi", " a", "</think>", "\n", "hi", " a"], [6, 7]),
    "same words": (thinking, ["<think>", "a", "</think>", "a<", "tool", "a"], [3, 4, 5]),
    "only thought": (thinking, ["<think>", "a"], []),
    "parts of tags": (thinking, ["<thi", "nk>a", "</thi", "nk>b", "c<", "/think"], [3, 4, 5]),
    "channels": (harmony, HARMONY, [11, 12]),
}
"""Readers, the texts of the tokens of an answer, and the indices of the tokens of the content."""


def piece_of(texts: Sequence[str], *, start: int, n_before: int) -> Piece:
    """Returns a piece of tokens whose numbers begin with `start`, behind `n_before` characters."""
    lengths = [0, *map(len, texts)][:-1]
    offsets = [n_before + offset for offset in itertools.accumulate(lengths)]
    n = len(texts)
    logprobs = Logprobs(array("f", [-1] * n), array("I", [1] * n), array("I"), array("f"))
    token_ids = tuple(range(start, start + n))
    scores = TokenScores(token_ids, tuple(offsets), logprobs)
    return Piece(0, "".join(texts), token_ids, None, scores)


def cut(texts: Sequence[str], *ends: int) -> list[Piece]:
    """Returns the tokens of an answer as pieces that end behind the given numbers of tokens."""
    bounds = [0, *ends, len(texts)]
    pieces = [
        piece_of(texts[begin:end], start=begin, n_before=len("".join(texts[:begin])))
        for begin, end in itertools.pairwise(bounds)
        if begin < end
    ]
    return [*pieces, Piece(0, finish_reason=FinishReason.STOP)]


def streamed(reader: MessageReader, pieces: Sequence[Piece], **options: Any) -> list[str]:
    """Returns the tokens of the log-probabilities of a stream."""
    generation: Any = FakeGeneration(reader)
    generation.options = GenerationOptions(n_logprobs=0, **options)
    reply = ChatReply(generation, ReplyOptions())
    reply.unenforced = ()
    events = [event for piece in pieces for event in reply.events(piece)]
    chunks = [json.loads(event.partition(b"data: ")[2]) for event in events]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    return [token["token"] for logprobs in found if logprobs for token in logprobs["content"]]


@pytest.mark.parametrize(("reader", "texts", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_tokens_of_the_content_have_log_probabilities(
    reader: Callable[[], MessageReader], texts: list[str], expected: list[int]
) -> None:
    names = list(map(str, expected))
    assert streamed(reader(), cut(texts, *range(len(texts)))) == names
    for at in range(len(texts)):
        assert streamed(reader(), cut(texts, at)) == names
    reply = ChatReply(FakeGeneration(reader()), ReplyOptions())  # type: ignore[arg-type]
    reply.unenforced = ()
    answer = json.loads(b"".join(reply.whole([Piece.joined(cut(texts))])))
    assert [one["token"] for one in answer["choices"][0]["logprobs"]["content"]] == names


@pytest.mark.parametrize(("reader", "texts", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_a_client_that_sees_the_tokens_gets_all_log_probabilities(
    reader: Callable[[], MessageReader], texts: list[str], expected: list[int]
) -> None:
    every = list(map(str, range(len(texts))))
    assert streamed(reader(), cut(texts, *range(len(texts))), return_token_ids=True) == every


def test_numbers_that_json_lacks_are_null() -> None:
    assert to_json({"x": float("nan"), "y": float("inf")}) == b'{"x":null,"y":null}'
