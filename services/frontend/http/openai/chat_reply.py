"""The reply of POST /v1/chat/completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.openai.answer import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Delta,
    FunctionDelta,
    ToolCallDelta,
)
from services.frontend.http.openai.reply import GenerationReply, ReplyOptions
from services.frontend.http.protocol.json_text import to_json
from services.frontend.http.protocol.text_logprobs import TextLogprobs
from services.frontend.http.protocol.token_logprobs import ChatTokenLogprob, token_logprobs
from services.frontend.http.transport.event_stream import Event, framed
from services.frontend.request.conversation import Conversation
from services.frontend.request.finish_reason import FinishReason
from services.frontend.text.message_reader import (
    CallDelta,
    MessageDelta,
    MessageReader,
    PlainReader,
    Words,
)


class ChatReply(GenerationReply):
    """The reply of POST /v1/chat/completions, with one message for each answer."""

    __slots__ = ("_readers", "_sources", "_thought_starts")

    id_prefix = "chatcmpl-"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_start = b'{"index":%d,"delta":{"content":'
    thought_start = b'{"index":%d,"delta":{"reasoning_content":'
    text_end = b'},"logprobs":null,"finish_reason":null}'

    def __init__(self, generation: Generation, options: ReplyOptions) -> None:
        super().__init__(generation, options)
        self._readers: dict[int, MessageReader] = {}
        self._sources: dict[int, TextLogprobs] = {}
        """Objects that find the log-probabilities of an answer's content, keyed by the index of the
        answer."""
        self._thought_starts: dict[int, bytes] = {}  # start of chunks with only reasoning, by index

    def text_event(self, index: int, text: str) -> Event | None:
        if index not in self._text_starts:
            return None
        reader = self._readers[index]
        if isinstance(reader, PlainReader):
            return super().text_event(index, text)
        new = reader.feed(text)
        words = new.only_words
        if words is None:
            return self._delta_event(index, new, reader) if new else b""
        return self._text_chunk(self._words_start(index, words), words.text)

    def _words_start(self, index: int, words: Words) -> bytes:
        """Returns the first part of an event whose chunk only adds `words`, a text or a piece of
        reasoning: all bytes that come before the words themselves."""
        if not words.is_reasoning:
            return self._text_starts[index]
        start = self._thought_starts.get(index)
        if start is None:
            start = self._thought_starts[index] = self._start_of(self.thought_start % index)
        return start

    def _delta_event(self, index: int, new: MessageDelta, reader: MessageReader) -> Event:
        """Returns the event of a chunk that adds `new` to an answer that has neither just begun nor
        ended. The event has no id and no log-probabilities."""
        choice = self._chunk_choice(Piece(index), _delta(new), reader)
        return framed(b"%b[%b]%b" % (self._chunk_start, to_json(choice), self._chunk_end))

    def _after_usage(self, pieces: Sequence[Piece]) -> Mapping[str, object]:
        fields: dict[str, object] = {}
        if self._has_ids:
            fields["prompt_token_ids"] = self._prompt_token_ids(0)
        if (n_top := self._options.n_prompt_logprobs) is not None:
            fields["prompt_logprobs"] = self._prompt_logprobs(pieces[0], n_top)
        return fields

    def _whole_choice(self, piece: Piece) -> ChatChoice:
        assert piece.finish_reason is not None  # a whole answer has ended
        reader = self._generation.message_reader(piece.index)
        said = reader.feed(piece.text) + reader.flush()
        choice: ChatChoice = {
            "index": piece.index,
            "message": _message(said),
            "logprobs": self._logprobs(piece, said, reader),
            "finish_reason": self._shown_reason(piece.finish_reason, piece.index, reader),
        }
        if self._wants_logprobs and choice["logprobs"] is None:
            choice["logprobs"] = {"content": [], "refusal": None}
        if self._has_ids:
            choice["token_ids"] = piece.token_ids
        if piece.receipt is not None:
            choice["receipt"] = piece.receipt
        return choice

    def _chunk_choices(
        self, piece: Piece, *, is_first: bool
    ) -> Iterator[tuple[Piece, ChatChunkChoice]]:
        reader = self._readers.get(piece.index)
        if reader is None:
            reader = self._generation.message_reader(piece.index)
            self._readers[piece.index] = reader
        if is_first:
            empty = Piece(piece.index)
            content = None if self._must_call(piece.index) else ""
            role: Delta = {"role": "assistant", "content": content, "refusal": None}
            yield empty, self._chunk_choice(empty, role, reader)
        new = reader.feed(piece.text)
        if piece.finish_reason is not None:
            new += reader.flush()
        logprobs = self._logprobs(piece, new, reader) if self._wants_logprobs else None
        if new or piece.finish_reason or logprobs is not None or self._has_ids:
            yield piece, self._chunk_choice(piece, _delta(new), reader, logprobs)

    def _chunk_choice(
        self,
        piece: Piece,
        delta: Delta,
        reader: MessageReader,
        logprobs: ChatLogprobs | None = None,
    ) -> ChatChunkChoice:
        reason = piece.finish_reason
        choice: ChatChunkChoice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason and self._shown_reason(reason, piece.index, reader),
        }
        if self._has_ids:
            choice["token_ids"] = piece.token_ids
        if piece.receipt is not None:
            choice["receipt"] = piece.receipt
        return choice

    def _logprobs(
        self, piece: Piece, said: MessageDelta, reader: MessageReader
    ) -> ChatLogprobs | None:
        """Returns the log-probabilities of the tokens that a piece adds to the content. Returns
        None if the piece adds none, or if the request has no `logprobs`. All tokens count as
        content if the client gets the tokens of the answer (`return_token_ids`), or if the whole
        answer is content."""
        scores, generation = piece.scores, self._generation
        if not self._wants_logprobs:
            return None
        if not (self._has_ids or isinstance(reader, PlainReader)):
            return self._logprobs_of_content(piece, said)
        if scores is None or scores.logprobs is None or not scores.token_ids:
            return None
        return {
            "content": token_logprobs(
                self._token_names,
                scores.token_ids[: generation.n_shown(piece)],
                scores.logprobs,
                n_top=generation.options.n_logprobs or 0,
            ),
            "refusal": None,
        }

    def _logprobs_of_content(self, piece: Piece, said: MessageDelta) -> ChatLogprobs | None:
        source = self._sources.get(piece.index)
        if source is None:
            is_whole = piece.finish_reason is not None
            source = TextLogprobs(self._generation, self._token_names, is_whole=is_whole)
            self._sources[piece.index] = source
        source.add(piece)
        content = list[ChatTokenLogprob]()
        for words in said.parts:
            if isinstance(words, Words):
                found = source.take(words)  # also for reasoning, whose tokens are dropped
                content += () if words.is_reasoning else found
        if piece.finish_reason is not None:
            self._sources.pop(piece.index).close()
        return {"content": content, "refusal": None} if content else None

    def _shown_reason(
        self, reason: FinishReason, index: int, reader: MessageReader
    ) -> FinishReason | Literal["tool_calls"]:
        """Returns the reason for the end of an answer, as OpenAI's API names the reason. An answer
        that ends with complete calls has the reason `tool_calls`, unless the client has named the
        tool that must be called."""
        if reason is not FinishReason.STOP or not reader.n_tool_calls or reader.ends_in_call:
            return reason
        return reason if self._mode(index) == "named" else "tool_calls"

    def _must_call(self, index: int) -> bool:
        return self._mode(index) in ("named", "required")

    def _mode(self, index: int) -> str:
        """Returns the mode of the tool choice of the answer `index`, such as `auto` or `required`.
        Returns `none` if the prompt is not a conversation."""
        prompt = self._generation.prompt_of(index).prompt
        return prompt.tool_choice.mode if isinstance(prompt, Conversation) else "none"


def _message(said: MessageDelta) -> AssistantMessage:
    is_silent = not said.content and (said.reasoning or said.tool_calls)
    message: AssistantMessage = {
        "role": "assistant",
        "content": None if is_silent else said.content,
        "refusal": None,
    }
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in said.tool_calls
        ]
    return message


def _delta(new: MessageDelta) -> Delta:
    delta: Delta = {}
    if new.reasoning:
        delta["reasoning_content"] = new.reasoning
    if new.content:
        delta["content"] = new.content
    if new.tool_calls:
        delta["tool_calls"] = [_call_delta(call) for call in new.tool_calls]
        if any(call.id for call in new.tool_calls):
            delta.setdefault("content", None)
    return delta


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function: FunctionDelta = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
