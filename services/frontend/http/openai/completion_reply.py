"""The shape of answers of POST /v1/completions."""

from collections.abc import Iterator

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.openai.event_id import StreamPosition
from services.frontend.http.openai.logprobs import CompletionLogprobs
from services.frontend.http.openai.reply import NO_OTHERS, Json, Shape, ShownFields


class CompletionShape(Shape):
    """The shape of POST /v1/completions; with `echo`, answers begin with their prompt."""

    __slots__ = ("_echo", "_n_echoed")

    id_prefix = "cmpl-"
    answer_object = "text_completion"
    chunk_object = "text_completion"
    text_start = b'{"index":%d,"text":'
    text_end = b',"logprobs":null,"finish_reason":null}'

    def __init__(
        self,
        generation: Generation,
        position: StreamPosition | None = None,
        *,
        shown: ShownFields = NO_OTHERS,
        echo: bool = False,
    ) -> None:
        super().__init__(generation, position, shown=shown)
        self._echo = echo
        self._n_echoed: dict[int, int] = {}  # characters before the answer's own, by index

    def _whole_choice(self, piece: Piece) -> Json:
        content = {"text": self._echoed(piece.index) + piece.text}
        return (
            self._choice(piece, content, is_first=True)
            | self._prompt_token_ids(piece.index)
            | self._prompt_logprobs(piece)
        )

    def _chunk_choices(self, piece: Piece, *, is_first: bool) -> Iterator[tuple[Piece, Json]]:
        if is_first:
            yield piece, self._whole_choice(piece)
        else:
            yield piece, self._choice(piece, {"text": piece.text})

    def _logprobs(self, piece: Piece, *, is_first: bool) -> Json | None:
        generation, index = self._generation, piece.index
        logprobs = CompletionLogprobs(generation.token_texts, generation.options.n_logprobs or 0)
        if self._echo and is_first:
            first, *others = generation.prompt_of(index).token_ids
            logprobs.add_unknown(first)
            if piece.prompt_logprobs is not None:
                logprobs.add(others, piece.prompt_logprobs)
            logprobs.add_offsets(generation.prompt_text_offsets(index), start=0)
        elif not piece.token_ids:
            return None
        if piece.logprobs is not None:
            if self._echo and index not in self._n_echoed:
                self._n_echoed[index] = len(generation.prompt_text(index))
            logprobs.add(piece.token_ids, piece.logprobs)
            logprobs.add_offsets(piece.text_offsets, start=self._n_echoed.get(index, 0))
        return logprobs.to_json()

    def _echoed(self, index: int) -> str:
        return self._generation.prompt_text(index) if self._echo else ""
