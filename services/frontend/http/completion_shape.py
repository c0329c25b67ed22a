"""The shape of answers of POST /v1/completions."""

from collections.abc import Iterator

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.event_id import StreamPosition
from services.frontend.http.openai_response import Json, Shape


class CompletionShape(Shape):
    """The shape of POST /v1/completions; with `echo`, answers begin with their prompt."""

    id_prefix = "cmpl-"
    answer_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        generation: Generation,
        position: StreamPosition | None = None,
        *,
        includes_usage: bool = False,
        counts_usage: bool = False,
        echo: bool = False,
    ) -> None:
        super().__init__(
            generation, position, includes_usage=includes_usage, counts_usage=counts_usage
        )
        self._echo = echo

    def _whole_choice(self, piece: Piece) -> Json:
        content = {"text": self._echoed(piece.index) + piece.text}
        return self._choice(piece, content) | self._prompt_token_ids(piece.index)

    def _chunk_choices(self, piece: Piece, *, is_first: bool) -> Iterator[tuple[Piece, Json]]:
        if is_first:
            yield piece, self._whole_choice(piece)
        else:
            yield piece, self._choice(piece, {"text": piece.text})

    def _echoed(self, index: int) -> str:
        return self._generation.prompt_text(index) if self._echo else ""
