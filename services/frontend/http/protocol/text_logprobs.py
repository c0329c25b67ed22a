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
    """Returns the log-probabilities of the tokens of each text of an answer, in order."""

    def __init__(self, generation: Generation, names: TokenNames, *, is_whole: bool) -> None:
        """`names` says how tokens are shown. `is_whole` says that the answer comes in one piece,
        whose memory is counted where the piece was made."""
        self._names = names
        self._n_top = generation.options.n_logprobs or 0
        self._scores = TextScores(keep_nothing if is_whole else generation.keep)

    def add(self, piece: Piece) -> None:
        """Takes the next piece of the answer, with its tokens and log-probabilities."""
        self._scores.add(piece.scores)

    def close(self) -> None:
        """Drops the tokens that no text has, since the answer has ended."""
        self._scores.close()

    def take(self, words: Words) -> list[ChatTokenLogprob]:
        """Returns the log-probabilities of the tokens that make a text. Tokens before this text are
        dropped."""
        scores = self._scores.take(words)
        if scores.logprobs is None:
            return []
        return token_logprobs(self._names, scores.token_ids, scores.logprobs, n_top=self._n_top)
