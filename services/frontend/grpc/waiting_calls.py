"""Calls that wait for a turn to receive their messages, grouped by client, so that no client keeps
other clients out.

Clients are compared by their number of waiting calls. A client with few calls gets the next turn
before a client with many, and a client with many calls is refused first. Similar numbers count as
equal, so that one waiting call less is no advantage: all numbers below `FEW` are equal, and so are
all numbers from `FEW` times a power of two up to, but not including, twice as many. Among equal
clients, the client that made the most recent call gets the next turn, because it is the least
likely to have disconnected. A client that got a turn becomes the last among its equals.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

FEW = 16
"""Clients with fewer waiting calls than this number count as equal."""

Call = TypeVar("Call")


class WaitingCalls(Generic[Call]):
    """The waiting calls of all clients. Every operation takes constant time."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[Call, None]] = {}
        """Waiting calls by client, oldest first."""
        self._levels: dict[int, OrderedDict[str, None]] = {}
        """Clients by level. A client with more waiting calls is on a higher level, see `_level`.
        The last client of a level is the next to get a turn. Empty levels are removed."""
        self._n_calls = 0

    def __len__(self) -> int:
        return self._n_calls

    def add(self, client: str, call: Call) -> None:
        """Adds a call that is not among the waiting calls yet."""
        calls = self._calls.setdefault(client, {})
        self._leave_level(client, len(calls))
        calls[call] = None
        self._n_calls += 1
        self._enter_level(client, len(calls), is_next=True)

    def discard(self, client: str, call: Call) -> None:
        """Removes a call if it waits."""
        calls = self._calls.get(client, {})
        if call not in calls:
            return
        self._leave_level(client, len(calls))
        del calls[call]
        self._n_calls -= 1
        if calls:
            self._enter_level(client, len(calls), is_next=False)
        else:
            del self._calls[client]

    def take_next(self) -> Call:
        """Removes a call and returns it: the newest call of the client that gets the next turn. At
        least one call must wait."""
        client = next(reversed(self._levels[min(self._levels)]))
        call = next(reversed(self._calls[client]))
        self.discard(client, call)
        return call

    def take_refused(self) -> Call:
        """Removes a call and returns it: the oldest call of the client that is refused first. At
        least one call must wait."""
        client = next(iter(self._levels[max(self._levels)]))
        call = next(iter(self._calls[client]))
        self.discard(client, call)
        return call

    def _enter_level(self, client: str, n_calls: int, *, is_next: bool) -> None:
        level = self._levels.setdefault(_level(n_calls), OrderedDict())
        level[client] = None
        level.move_to_end(client, last=is_next)

    def _leave_level(self, client: str, n_calls: int) -> None:
        if not n_calls:
            return
        level = self._levels[_level(n_calls)]
        del level[client]
        if not level:
            del self._levels[_level(n_calls)]


def _level(n_calls: int) -> int:
    """Returns the level of a client with `n_calls` waiting calls. Clients on one level count as
    equal, and clients on lower levels get turns first."""
    return (n_calls // FEW).bit_length()
