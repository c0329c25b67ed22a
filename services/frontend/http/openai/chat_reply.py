"""The shape of answers of POST /v1/chat/completions."""

from collections.abc import Iterator, Sequence

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.openai.event_id import StreamPosition
from services.frontend.http.openai.logprobs import chat_logprobs
from services.frontend.http.openai.reply import NO_OTHERS, Json, Shape, ShownFields
from services.frontend.request.conversation import Conversation
from services.frontend.request.finish_reason import FinishReason
from services.frontend.text.message_reader import (
    MessageDelta,
    MessageReader,
    PlainReader,
    ToolCallDelta,
)


class ChatShape(Shape):
    """The shape of POST /v1/chat/completions."""

    __slots__ = ("_readers",)

    id_prefix = "chatcmpl-"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_start = b'{"index":%d,"delta":{"content":'
    text_end = b'},"logprobs":null,"finish_reason":null}'

    def __init__(
        self,
        generation: Generation,
        position: StreamPosition | None = None,
        *,
        shown: ShownFields = NO_OTHERS,
    ) -> None:
        super().__init__(generation, position, shown=shown)
        self._readers: dict[int, MessageReader] = {}

    def _end(self, pieces: Sequence[Piece]) -> Json:
        return self._prompt_token_ids(0) | self._prompt_logprobs(pieces[0])

    def _is_text(self, index: int) -> bool:
        return isinstance(self._readers.get(index), PlainReader)

    def _whole_choice(self, piece: Piece) -> Json:
        reader = self._generation.message_reader(piece.index)
        said = reader.feed(piece.text) + reader.flush()
        is_silent = not said.content and (said.reasoning or said.tool_calls)
        message: Json = {
            "role": "assistant",
            "content": None if is_silent else said.content,
            "refusal": None,
        }
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, **_function(name=call.name, arguments=call.arguments)}
                for call in said.tool_calls
            ]
        return self._ended(self._choice(piece, {"message": message}), reader)

    def _logprobs(self, piece: Piece, *, is_first: bool) -> Json | None:
        if piece.logprobs is None or not piece.token_ids:
            return None
        generation = self._generation
        return chat_logprobs(
            generation.token_texts,
            piece.token_ids,
            piece.logprobs,
            n_top=generation.options.n_logprobs or 0,
        )

    def _chunk_choices(self, piece: Piece, *, is_first: bool) -> Iterator[tuple[Piece, Json]]:
        if is_first:
            role = {"role": "assistant", "content": "", "refusal": None}
            empty = Piece(piece.index)
            yield empty, self._choice(empty, {"delta": role})
        reader = self._readers.get(piece.index)
        if reader is None:
            reader = self._generation.message_reader(piece.index)
            self._readers[piece.index] = reader
        if isinstance(reader, PlainReader):
            delta = {"content": piece.text} if piece.text else {}
        else:
            new = reader.feed(piece.text)
            delta = _delta(new if piece.finish_reason is None else new + reader.flush())
        if delta or piece.finish_reason or piece.logprobs is not None or self._has_ids:
            yield piece, self._ended(self._choice(piece, {"delta": delta}), reader)

    def _ended(self, choice: Json, reader: MessageReader) -> Json:
        """Returns a choice with the reason that OpenAI gives for an answer that ends with calls: a
        call of the tool that the client has named just stops."""
        prompt = self._generation.prompt_of(choice["index"]).prompt
        is_named = isinstance(prompt, Conversation) and prompt.tool_choice.mode == "named"
        if choice["finish_reason"] == FinishReason.STOP and reader.n_tool_calls and not is_named:
            choice["finish_reason"] = "tool_calls"
        return choice


def _delta(new: MessageDelta) -> Json:
    delta: Json = {}
    if new.reasoning:
        delta["reasoning_content"] = new.reasoning
    if new.content:
        delta["content"] = new.content
    if new.tool_calls:
        delta["tool_calls"] = [_call_delta(call) for call in new.tool_calls]
    return delta


def _call_delta(call: ToolCallDelta) -> Json:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = _function(name=call.name, arguments=call.arguments)
    return {"index": call.index, "id": call.id, **function}


def _function(*, name: str, arguments: str) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
