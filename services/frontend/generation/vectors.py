"""Runs a generation whose result is vectors (embeddings or scores), and yields the vectors of its
prompts in order."""

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Sequence
from sys import byteorder
from typing import TypeAlias

from services.common import errors
from services.common.pooling import Pooling
from services.frontend.generation.generation import Generation
from services.frontend.request.vector_defaults import VectorDefaults

FLOAT_BYTES = 4
"""Size of an element of a vector in messages, in bytes."""

Vector: TypeAlias = "array[float]"
"""Type of a vector: an array of floats of 4 bytes."""


async def vectors_of(generation: Generation) -> AsyncIterator[Vector]:
    """Starts a generation, waits until it is complete and yields the vector of each prompt. Lets
    other tasks run after each vector, because there may be a thousand vectors with thousands of
    elements each.

    Raises:
        OrcinusError: whatever `Generation.start` and `Generation.complete` raise.
        RequestFailed: a vector is missing, or has a wrong length.
    """
    await generation.start()
    pieces = await generation.complete()
    # All are checked before the first is yielded, since that one may be sent at once.
    for data in [_checked(piece.vector, generation.pooling) for piece in pieces]:
        yield _parsed(data)
        await asyncio.sleep(0)


async def embeddings_of(
    generation: Generation, defaults: VectorDefaults, *, n_values: int | None
) -> AsyncIterator[Vector]:
    """Starts a generation, waits until it is complete and yields the embedding of each prompt: the
    prompt's vector, cut to `n_values` elements. None means whole vectors.

    Raises:
        InvalidRequest: the model makes no embeddings of this length.
        OrcinusError: whatever `vectors_of` raises.
    """
    pooling = generation.pooling
    if pooling is not None and n_values is not None:
        defaults.check_length(n_values, whole=pooling.n_values)
    is_normalised = pooling is not None and pooling.is_normalised
    async for vector in vectors_of(generation):
        yield shortened(vector, n_values, is_normalised=is_normalised)


def shortened(vector: Vector, n_values: int | None, *, is_normalised: bool) -> Vector:
    """Returns the first `n_values` elements of a vector. If `is_normalised`, they are divided by
    their Euclidean norm; if all are 0, they are returned as they are."""
    values = vector[:n_values]
    length = math.hypot(*values) if is_normalised else 1.0
    return array("f", [value / length for value in values]) if length else values


def probability(score: float) -> float:
    """Returns the logistic function of a score. The result is a number from 0 to 1."""
    if score >= 0:
        return 1 / (1 + math.exp(-score))
    return math.exp(score) / (1 + math.exp(score))


def little_endian(values: Sequence[float]) -> bytes:
    """Returns numbers as little-endian floats of 4 bytes each."""
    packed = array("f", values)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _checked(data: bytes | None, pooling: Pooling | None) -> bytes:
    if not data:
        raise errors.RequestFailed("the scheduler ended the request without its vector")
    if pooling is not None and len(data) != FLOAT_BYTES * pooling.n_values:
        raise errors.RequestFailed(f"a vector has {len(data)} bytes, not {pooling.n_values} floats")
    return data


def _parsed(data: bytes) -> Vector:
    values = array("f")
    values.frombytes(data)
    if byteorder == "big":
        values.byteswap()
    return values
