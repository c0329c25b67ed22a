"""Scores of pairs of texts, from a generation that is for vectors."""

from services.common import errors
from services.frontend.generation.generation import Generation
from services.frontend.generation.vectors import probability, vectors_of


async def scores_of(generation: Generation) -> list[float]:
    """Starts a generation, waits for it and returns the score of each prompt.

    Raises:
        InvalidRequest: the model makes no scores.
        OrcinusError: whatever `vectors_of` raises.
    """
    pooling = generation.pooling
    if pooling is None or not pooling.makes_scores:
        raise errors.InvalidRequest("model", "makes embeddings, and no scores of pairs of texts")
    scores = [vector[0] for vector in await vectors_of(generation)]
    return [probability(score) for score in scores] if pooling.has_sigmoid else scores
