"""The log-probabilities of the texts of one answer, in the form that OpenAI's protocols for
conversations share."""

from services.frontend.generation.answer import Piece
from services.frontend.generation.generation import Generation
from services.frontend.generation.text_scores import TextScores, keep_nothing
from services.frontend.http.protocol.token_logprobs import (
    ChatTokenLogprob,
    TokenNames,
    token_logprobs,
)
from services.frontend.text.message_reader import Words


class TextLogprobs:
    """Finds the log-probabilities of the tokens of each text of an answer. `take` must be called
    with the texts in their order."""

    def __init__(self, generation: Generation, names: TokenNames, *, is_whole: bool) -> None:
        """`names` determines how tokens are shown to the client. `is_whole` says that the answer
        comes in one piece. The memory of such a piece has been counted already, so its tokens are
        not counted again."""
        self._names = names
        self._n_top = generation.options.n_logprobs or 0
        self._scores = TextScores(keep_nothing if is_whole else generation.keep)

    def add(self, piece: Piece) -> None:
        """Takes the next piece of the answer, with its tokens and log-probabilities."""
        self._scores.add(piece.scores)

    def close(self) -> None:
        """Drops the tokens that belong to no text. Called at the end of the answer."""
        self._scores.close()

    def take(self, words: Words) -> list[ChatTokenLogprob]:
        """Returns the log-probabilities of the tokens that spell the text `words`, including a
        token that begins before the text and ends in it. Drops all earlier tokens. Returns an empty
        list if the tokens have no log-probabilities."""
        scores = self._scores.take(words)
        if scores.logprobs is None:
            return []
        return token_logprobs(self._names, scores.token_ids, scores.logprobs, n_top=self._n_top)
