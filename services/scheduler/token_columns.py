"""Columns of new tokens in a message to a frontend: arrays instead of an entry for each token."""

from array import array
from collections.abc import Iterable
from itertools import chain

from orcinus.v1 import scheduler_pb2

NewToken = tuple[int, int, int]
"""The number of a request, the index of a new token in the request's output, and the token."""


class NewTokens:
    """Collects new tokens until they are sent, in a list of the last iteration's tokens and one
    packed array of all earlier tokens."""

    def __init__(self) -> None:
        self._newest: list[NewToken] = []
        self._packed = array("I")  # three numbers for each token

    def __bool__(self) -> bool:
        return bool(self._newest or self._packed)

    def next_iteration(self) -> list[NewToken]:
        """Packs the waiting tokens. Returns an empty list, to which the caller appends the tokens
        of an iteration. The caller may append to the list until the next call, also after
        `move_to`."""
        self._packed.extend(chain.from_iterable(self._newest))
        self._newest.clear()
        return self._newest

    def move_to(self, columns: scheduler_pb2.TokenColumns) -> None:
        """Moves all collected tokens to `columns`. `columns` must be empty. Tokens of one request
        are joined, so that a slow frontend gets one update for each request."""
        self.next_iteration()
        packed, self._packed = self._packed, array("I")
        numbers, starts, token_ids = packed[0::3], packed[1::3], packed[2::3]
        if len(set(numbers)) < len(numbers):
            _join(zip(numbers, starts, token_ids, strict=True), columns)
            return
        columns.numbers.extend(numbers)
        columns.starts.extend(starts)
        columns.n_tokens.extend([1] * len(numbers))
        columns.token_ids.extend(token_ids)


def _join(tokens: Iterable[NewToken], columns: scheduler_pb2.TokenColumns) -> None:
    """Adds tokens to `columns`, with one entry for each request: the number of the request, the
    index of its first token, the number of its tokens, and the tokens."""
    starts: dict[int, int] = {}
    joined: dict[int, list[int]] = {}
    for number, start, token_id in tokens:
        starts.setdefault(number, start)
        joined.setdefault(number, []).append(token_id)
    columns.numbers.extend(starts.keys())
    columns.starts.extend(starts.values())
    columns.n_tokens.extend(map(len, joined.values()))
    columns.token_ids.extend(chain.from_iterable(joined.values()))
