"""The shape of answers of POST /v1/chat/completions."""

from collections.abc import Iterator, Sequence

from services.frontend.generation.answer import Piece
from services.frontend.http.logprobs_shape import chat_logprobs
from services.frontend.http.openai_response import Json, Shape


class ChatShape(Shape):
    """The shape of POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def answer(self, pieces: Sequence[Piece]) -> Json:
        answer = super().answer(pieces) | self._prompt_token_ids(0)
        return answer | self._prompt_logprobs(pieces[0])

    def _whole_choice(self, piece: Piece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(piece, {"message": message})

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
        delta = {"content": piece.text} if piece.text else {}
        yield piece, self._choice(piece, {"delta": delta})
