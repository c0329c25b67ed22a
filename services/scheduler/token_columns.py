"""Columns of new tokens in a message to a frontend: arrays instead of an entry for each token."""

from array import array
from collections.abc import Iterable
from itertools import chain

from orcinus.v1 import scheduler_pb2

NewToken = tuple[int, int, int]
"""The number of a request, the index of a new token in the request's output, and the token."""


class NewTokens:
    """New tokens that wait to be sent: a list of the last iteration's tokens, and one packed array
    of all earlier tokens."""

    def __init__(self) -> None:
        self._newest: list[NewToken] = []
        self._packed = array("I")  # three numbers for each token

    def __bool__(self) -> bool:
        return bool(self._newest or self._packed)

    def next_iteration(self) -> list[NewToken]:
        """Packs the waiting tokens. Returns an empty list, to which the caller appends the tokens
        of an iteration. The list may be appended to until the next call, also after `take`."""
        self._packed.extend(chain.from_iterable(self._newest))
        self._newest.clear()
        return self._newest

    def take(self) -> scheduler_pb2.TokenColumns:
        """Returns all waiting tokens as columns, which are lists of equal length, and forgets the
        tokens. There must be at least one token. Tokens of one request are joined, so that a slow
        frontend gets one update for each request."""
        newest, packed = tuple(self._newest), self._packed
        self._newest.clear()
        self._packed = array("I")
        if packed:
            numbers = iter(packed)
            return _joined(chain(zip(numbers, numbers, numbers, strict=True), newest))
        if len({number for number, _, _ in newest}) < len(newest):
            return _joined(newest)
        each_number, starts, token_ids = zip(*newest, strict=True)
        return scheduler_pb2.TokenColumns(
            numbers=each_number, starts=starts, n_tokens=[1] * len(newest), token_ids=token_ids
        )


def _joined(tokens: Iterable[NewToken]) -> scheduler_pb2.TokenColumns:
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
