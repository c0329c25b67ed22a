"""The answers of one call as messages of `inference.proto`: whole, or piece by piece in a stream.

The text of an answer to a conversation is split into content, reasoning and tool calls by the same
reader as over HTTP.
"""

from collections.abc import Sequence
from typing import Any

from orcinus.v1 import inference_pb2

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation, TokenUsage
from services.frontend.generation.receipts import receipt_json
from services.frontend.generation.text_scores import TextScores, keep_nothing
from services.frontend.generation.token_scores import TokenScores
from services.frontend.grpc.logprobs import token_logprobs
from services.frontend.request.conversation import Conversation
from services.frontend.request.finish_reason import FinishReason
from services.frontend.text.message_reader import MessageDelta, MessageReader, PlainReader, Words

_FINISH_REASONS = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class AnswerMessages:
    """Makes the messages for the answers of one call. After a resumption, the messages begin with
    the first text that the client has not received."""

    def __init__(
        self,
        generation: Generation,
        message: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest,
    ) -> None:
        """`message` is the client's request."""
        self._generation = generation
        self._has_several_prompts = bool(message.prompts)
        self._shows_tokens = generation.options.return_token_ids
        self._is_conversation = isinstance(generation.prompts[0].prompt, Conversation)
        self._readers: dict[int, MessageReader] = {}
        self._contents: dict[int, TextScores] = {}
        """Log-probabilities of the contents of answers to a conversation, keyed by the index of the
        answer."""
        self._unechoed: set[int] = set()
        """Indices of the answers that still lack their first message, which begins with the text of
        the prompt (`echo`)."""
        if message.options.echo:
            self._unechoed.update(filter(generation.is_new, range(generation.n_answers)))
        self._first: dict[str, Any] = {}
        """Fields that only the first message of a stream carries."""
        if not generation.is_resumed:
            seed = generation.options.sampling.seed
            self._first = {
                "seed": seed,
                "unenforced": generation.unenforced,
                **self._prompt_tokens(),
            }

    def whole(self, pieces: Sequence[Piece]) -> inference_pb2.GenerateResponse:
        """Returns one message with all answers. Each of `pieces` is a whole answer."""
        return inference_pb2.GenerateResponse(
            request_id=self._generation.request_id,
            model=self._generation.model,
            choices=[self._choice(piece) for piece in pieces],
            usage=usage_message(self._generation.usage),
            unenforced=self._generation.unenforced,
            **self._prompt_tokens(),
        )

    def streamed(self, piece: Piece) -> inference_pb2.GenerateStreamResponse | None:
        """Returns the stream message for a new piece of an answer. Returns None if the piece adds
        nothing that the client can be shown yet."""
        choice = self._choice(piece)
        if not (choice.text or choice.token_ids or choice.finish_reason) and not (
            choice.reasoning_content or choice.tool_calls or choice.logprobs
        ):
            return None
        first, self._first = self._first, {}
        return inference_pb2.GenerateStreamResponse(
            request_id=self._generation.request_id,
            model=self._generation.model,
            choice=choice,
            **first,
        )

    def end(self) -> inference_pb2.GenerateStreamResponse:
        """Returns the last message of a stream, which carries the usage."""
        return inference_pb2.GenerateStreamResponse(
            request_id=self._generation.request_id,
            model=self._generation.model,
            usage=usage_message(self._generation.usage),
        )

    def _choice(self, piece: Piece) -> inference_pb2.Choice:
        choice = inference_pb2.Choice(
            index=piece.index,
            text=piece.text,
            token_ids=piece.token_ids if self._shows_tokens else (),
            finish_reason=_FINISH_REASONS[piece.finish_reason],
            schema_valid=piece.schema_valid,
            receipt=receipt_json(piece.receipt),
        )
        scores = piece.scores
        if self._is_conversation:
            reader = self._reader(piece.index)
            if not isinstance(reader, PlainReader):
                delta = _read(reader, piece, choice)
                self._end(reader, choice)
                if not self._shows_tokens:
                    scores = self._scores_of_content(piece, delta)
        elif piece.index in self._unechoed:
            self._unechoed.remove(piece.index)
            choice.text = self._generation.prompt_text(piece.index) + piece.text
        self._add_logprobs(piece, scores, choice)
        return choice

    def _scores_of_content(self, piece: Piece, delta: MessageDelta) -> TokenScores | None:
        """Returns the log-probabilities of the tokens that a piece adds to the content. Returns
        None if the client does not ask for log-probabilities."""
        if self._generation.options.n_logprobs is None:
            return None
        source = self._contents.get(piece.index)
        if source is None:
            is_whole = piece.finish_reason is not None
            keep = keep_nothing if is_whole else self._generation.keep
            source = self._contents[piece.index] = TextScores(keep)
        source.add(piece.scores)
        parts = [(part, source.take(part)) for part in delta.parts if isinstance(part, Words)]
        if piece.finish_reason is not None:
            self._contents.pop(piece.index).close()
        return TokenScores.joined([scores for part, scores in parts if not part.is_reasoning])

    def _add_logprobs(
        self, piece: Piece, scores: TokenScores | None, choice: inference_pb2.Choice
    ) -> None:
        """Adds log-probabilities to `choice`, the message of a piece, as far as the client asks for
        them: of the tokens in `scores`, and of the prompt's tokens."""
        generation, options = self._generation, self._generation.options
        if (n_top := options.n_logprobs) is not None and scores is not None:
            choice.logprobs.extend(
                token_logprobs(
                    generation.token_texts, scores.token_ids, scores.logprobs, n_top=n_top
                )
            )
        if (n_top := options.n_prompt_logprobs) is not None:
            prompt = generation.prompt_of(piece.index).token_ids[1:]
            choice.prompt_logprobs.extend(
                token_logprobs(generation.token_texts, prompt, piece.prompt_logprobs, n_top=n_top)
            )

    def _reader(self, index: int) -> MessageReader:
        """Returns the message reader of an answer. After a resumption, the reader has already read
        the text that the client received before."""
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._generation.message_reader(index)
        return reader

    def _end(self, reader: MessageReader, choice: inference_pb2.Choice) -> None:
        """Changes the finish reason of an answer that ends with complete tool calls to
        `FINISH_REASON_TOOL_CALLS`. If the client has named the tool that must be called, the reason
        stays `FINISH_REASON_STOP`. The HTTP API does the same."""
        prompt = self._generation.prompt_of(choice.index).prompt
        is_named = isinstance(prompt, Conversation) and prompt.tool_choice.mode == "named"
        if (
            choice.finish_reason == inference_pb2.FINISH_REASON_STOP
            and reader.n_tool_calls
            and not reader.ends_in_call
            and not is_named
        ):
            choice.finish_reason = inference_pb2.FINISH_REASON_TOOL_CALLS

    def _prompt_tokens(self) -> dict[str, Any]:
        if not self._shows_tokens:
            return {}
        prompts = self._generation.prompts
        if not self._has_several_prompts:
            return {"prompt_token_ids": prompts[0].token_ids}
        return {
            "prompts_token_ids": [inference_pb2.TokenIds(ids=each.token_ids) for each in prompts]
        }


def _read(reader: MessageReader, piece: Piece, choice: inference_pb2.Choice) -> MessageDelta:
    """Sets the fields of a choice to the content, reasoning and tool calls that a piece adds to the
    assistant's message. Returns what the piece adds."""
    delta = reader.feed(piece.text)
    if piece.finish_reason is not None:
        delta += reader.flush()
    choice.text, choice.reasoning_content = delta.content, delta.reasoning
    for call in delta.tool_calls:
        choice.tool_calls.add(
            id=call.id, name=call.name, arguments=call.arguments, index=call.index
        )
    return delta


def usage_message(usage: TokenUsage) -> inference_pb2.Usage:
    """Returns the message that has the numbers of tokens of a call."""
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
