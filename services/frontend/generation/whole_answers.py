"""Collects the answers of a call that is not streamed. The client gets the answers when all are
complete."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.frontend.generation.answer import Piece
from services.frontend.request.generation_request import GenerationOptions
from services.frontend.request.logprobs import LOGPROB_BYTES
from services.frontend.request.memory_budget import Share

MAX_PIECES = 64
"""Number of pieces of an answer at which the pieces are joined into one, to save memory."""

OUTPUT_TOKEN_BYTES = 40
"""Bytes of memory that a token of an answer takes, if the client gets tokens."""


class WholeAnswers:
    """Joins the pieces of each answer. The memory of the pieces is counted in the call's share of
    the memory budget. The memory of vectors has been counted before (`vector_bytes`)."""

    def __init__(self, options: GenerationOptions, share: Share, *, n_answers: int) -> None:
        self._options = options
        self._share = share
        self._answers: list[list[Piece]] = [[] for _ in range(n_answers)]

    def add(self, piece: Piece) -> None:
        """Takes the next piece of an answer. Whenever the answer has `MAX_PIECES` pieces, joins
        them and counts their memory. Raises PoolFull if the memory budget has too little memory
        left."""
        pieces = self._answers[piece.index]
        pieces.append(piece)
        if len(pieces) == MAX_PIECES:
            n_before = _n_bytes(pieces[0])
            pieces[:] = [self._joined(pieces)]
            self._share.grow(_n_bytes(pieces[0]) - n_before)

    def best(self, sign: Callable[[Piece], Piece]) -> list[Piece]:
        """Returns the answers in order, each as one piece. If more answers were generated for a
        prompt (`best_of`) than the client requests (`n`), returns the `n` answers with the highest
        mean log-probability, the highest first. In that case `sign` is called for each returned
        answer, and returns the answer with its receipt."""
        answers = [self._joined(pieces) for pieces in self._answers]
        n, n_generated = self._options.n, self._options.n_generated
        if not self._options.is_ranked:
            return answers
        best: list[Piece] = []
        for start in range(0, len(answers), n_generated):
            candidates = answers[start : start + n_generated]
            for piece in sorted(candidates, key=_mean_logprob, reverse=True)[:n]:
                wanted = piece.scores if self._options.n_logprobs is not None else None
                best.append(replace(sign(piece), index=len(best), scores=wanted))
        return best

    def _joined(self, pieces: Sequence[Piece]) -> Piece:
        """Returns the pieces of an answer as one piece. The tokens are left out if the client does
        not get tokens."""
        joined = Piece.joined(pieces)
        return joined if self._options.shows_tokens else replace(joined, token_ids=())


def _n_bytes(piece: Piece) -> int:
    """Returns the approximate memory of a piece, in bytes."""
    n_bytes = len(piece.text) + OUTPUT_TOKEN_BYTES * len(piece.token_ids)
    return n_bytes if piece.logprobs is None else n_bytes + LOGPROB_BYTES * piece.logprobs.n_numbers


def _mean_logprob(piece: Piece) -> float:
    """Returns the mean log-probability of the tokens of an answer, or 0.0 if the answer has no
    tokens."""
    if piece.logprobs is None or not len(piece.logprobs):
        return 0.0
    return sum(piece.logprobs.values) / len(piece.logprobs)
