"""The reply of POST /v1/completions."""

from collections.abc import Iterator

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.http.openai.answer import CompletionChoice, CompletionLogprobs
from services.frontend.http.openai.logprobs import CompletionColumns
from services.frontend.http.openai.reply import GenerationReply, ReplyOptions


class CompletionReply(GenerationReply):
    """The reply of POST /v1/completions, with one text for each answer. With `echo` the text begins
    with the prompt."""

    __slots__ = ("_n_echoed",)

    id_prefix = "cmpl-"
    answer_object = "text_completion"
    chunk_object = "text_completion"
    text_start = b'{"index":%d,"text":'
    text_end = b',"logprobs":null,"finish_reason":null}'

    def __init__(self, generation: Generation, options: ReplyOptions) -> None:
        super().__init__(generation, options)
        self._n_echoed: dict[int, int] = {}  # characters of the prompt before each answer, by index

    def _whole_choice(self, piece: Piece) -> CompletionChoice:
        echoed = self._generation.prompt_text(piece.index) if self._options.echo else ""
        choice = self._choice(piece, echoed + piece.text, is_first=True)
        if self._has_ids:
            choice["prompt_token_ids"] = self._prompt_token_ids(piece.index)
        if (n_top := self._options.n_prompt_logprobs) is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(piece, n_top)
        return choice

    def _chunk_choices(
        self, piece: Piece, *, is_first: bool
    ) -> Iterator[tuple[Piece, CompletionChoice]]:
        if is_first:
            yield piece, self._whole_choice(piece)
        else:
            yield piece, self._choice(piece, piece.text, is_first=False)

    def _choice(self, piece: Piece, text: str, *, is_first: bool) -> CompletionChoice:
        choice: CompletionChoice = {
            "index": piece.index,
            "text": text,
            "logprobs": self._logprobs(piece, is_first=is_first) if self._wants_logprobs else None,
            "finish_reason": piece.finish_reason,
        }
        if self._has_ids:
            choice["token_ids"] = piece.token_ids
        if piece.receipt is not None:
            choice["receipt"] = piece.receipt
        return choice

    def _logprobs(self, piece: Piece, *, is_first: bool) -> CompletionLogprobs | None:
        """Returns the log-probabilities of the tokens of a piece, or None if the piece has no
        tokens. With `echo`, the log-probabilities of the prompt come first in the first piece of an
        answer (`is_first`)."""
        generation, index = self._generation, piece.index
        columns = CompletionColumns(self._token_names, generation.options.n_logprobs or 0)
        if self._options.echo and is_first:
            first, *others = generation.prompt_of(index).token_ids
            columns.add_unknown(first)
            if piece.prompt_logprobs is not None:
                columns.add(others, piece.prompt_logprobs)
            columns.add_offsets(generation.prompt_text_offsets(index), start=0)
        elif piece.scores is None or not piece.scores.token_ids:
            return None
        if piece.scores is not None and piece.scores.logprobs is not None:
            if self._options.echo and index not in self._n_echoed:
                self._n_echoed[index] = len(generation.prompt_text(index))
            columns.add(piece.scores.token_ids, piece.scores.logprobs)
            columns.add_offsets(piece.scores.offsets, start=self._n_echoed.get(index, 0))
        return columns.to_answer()
