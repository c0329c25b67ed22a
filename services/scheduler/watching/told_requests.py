"""The requests that events have named: their numbers, and how many of their tokens were computed.

A request gets a number when an event names the request for the first time; no other request ever
gets that number. The entry of a request is removed when the request ends.
"""

from dataclasses import dataclass

from services.scheduler.core.request import Request


@dataclass(slots=True)
class ToldRequest:
    """The record of a request that an event of a watch has named. It is kept until the request
    ends."""

    number: int
    n_computed: int = 0
    """Number of tokens of the request whose keys and values are in memory, or being computed."""
    n_lost: int = 0
    """Number of tokens of the request whose keys and values were in memory and were lost."""

    def put_down(self) -> None:
        """Notes that the keys and values of the request were lost, because it was preempted or
        suspended."""
        self.n_lost = max(self.n_lost, self.n_computed)
        self.n_computed = 0


class ToldRequests:
    """Gives numbers to requests, and keeps an entry for each until the request ends."""

    def __init__(self) -> None:
        self._told: dict[Request, ToldRequest] = {}
        self._n_numbers = 0

    def __len__(self) -> int:
        return len(self._told)

    def of(self, request: Request) -> ToldRequest:
        """Returns the entry of a request. A request without an entry gets one, with a new
        number."""
        told = self._told.get(request)
        if told is None:
            self._n_numbers += 1
            n_lost = max(0, request.n_tokens - 1) if request.generated_token_ids else 0
            told = ToldRequest(self._n_numbers, request.n_scheduled, n_lost)
            if request.is_decoding:
                told.n_lost = 0
            self._told[request] = told
        return told

    def number(self, request: Request) -> int:
        """Returns the number of a request, which is a new number if no event has named the
        request."""
        return self.of(request).number

    def get(self, request: Request) -> ToldRequest | None:
        """Returns the entry of a request. Returns None if no event has named the request."""
        return self._told.get(request)

    def forget(self, request: Request) -> None:
        """Removes the entry of a request that has ended."""
        self._told.pop(request, None)
