"""Scores of pairs of texts, from a generation whose result is vectors."""

from services.frontend.generation.generation import Generation
from services.frontend.generation.vectors import probability, vectors_of


async def scores_of(generation: Generation) -> list[float]:
    """Starts a generation, waits for it and returns the score of each prompt.

    Raises:
        OrcinusError: whatever `vectors_of` raises.
    """
    scores = [vector[0] async for vector in vectors_of(generation)]
    has_sigmoid = generation.pooling is not None and generation.pooling.has_sigmoid
    return [probability(score) for score in scores] if has_sigmoid else scores
