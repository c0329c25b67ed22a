"""Chunks of a chat: nothing that belongs to a token is lost where its text is held back."""

from array import array
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

    def n_shown(self, piece: Piece) -> int:
        return 0 if piece.scores is None else len(piece.scores.token_ids)

    def prompt_of(self, _: int) -> Any:
        return SimpleNamespace(prompt="x")


@pytest.mark.parametrize(
    ("reader", "texts"),
    [
        (PlainReader(), ["a", "", "\N{GRINNING FACE}", "b"]),
        (Hermes().reader(CallRules(new_id=str)), CALL),
    ],
    ids=["plain", "call"],
)
def test_each_token_has_its_log_probability(reader: MessageReader, texts: list[str]) -> None:
    reply = ChatReply(FakeGeneration(reader), ReplyOptions())  # type: ignore[arg-type]
    reply.unenforced = ()
    pieces = [
        Piece(
            0,
            text,
            (number,),
            None,
            TokenScores(
                (number,), (0,), Logprobs(array("f", [-1]), array("I", [1]), array("I"), array("f"))
            ),
        )
        for number, text in enumerate(texts)
    ]
    last = Piece(0, finish_reason=FinishReason.STOP)
    sent = b"".join(event for piece in (*pieces, last) for event in reply.events(piece))
    assert sent.count(b'"logprob":') == len(texts)


def test_numbers_that_json_lacks_are_null() -> None:
    assert to_json({"x": float("nan"), "y": float("inf")}) == b'{"x":null,"y":null}'
