"""The columns of a message to a frontend, in which new tokens need no entries of their own."""

from collections.abc import Sequence
from itertools import chain

from orcinus.v1 import scheduler_pb2

NewToken = tuple[int, int, int]
"""A request's number, the place of its new token among those of its output, and the token."""


def columns_of(tokens: Sequence[NewToken]) -> scheduler_pb2.TokenColumns:
    """Returns columns of new tokens, of which there must be one, in order. Those of one request
    come together: a frontend that is behind has one update of each."""
    numbers, starts, token_ids = zip(*tokens, strict=True)
    if len(set(numbers)) < len(numbers):
        return _joined(tokens)
    return scheduler_pb2.TokenColumns(
        numbers=numbers, starts=starts, n_tokens=[1] * len(numbers), token_ids=token_ids
    )


def _joined(tokens: Sequence[NewToken]) -> scheduler_pb2.TokenColumns:
    starts: dict[int, int] = {}
    joined: dict[int, list[int]] = {}
    for number, start, token_id in tokens:
        starts.setdefault(number, start)
        joined.setdefault(number, []).append(token_id)
    return scheduler_pb2.TokenColumns(
        numbers=starts.keys(),
        starts=starts.values(),
        n_tokens=map(len, joined.values()),
        token_ids=chain.from_iterable(joined.values()),
    )
