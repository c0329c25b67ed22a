"""The admitted requests that can be in the next iteration of a pipeline, sorted by
`Request.place`."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.scheduler.core.request import Request


class ReadyRequests:
    """Keeps requests in a list, each once, sorted by their places."""

    def __init__(self) -> None:
        self.by_place: list[Request] = []
        """The requests, sorted by their places. Only this object may change the list."""

    def __iter__(self) -> Iterator[Request]:
        return iter(self.by_place)

    def add(self, request: Request) -> None:
        """Adds a request, unless it is there already."""
        ready = self.by_place
        if not ready or _place_of(ready[-1]) < _place_of(request):
            ready.append(request)
        elif self._index(request) is None:
            insort(ready, request, key=_place_of)

    def discard(self, request: Request) -> bool:
        """Removes a request. Returns False if the request was not in the list."""
        index = self._index(request)
        if index is not None:
            del self.by_place[index]
        return index is not None

    def replace(self, requests: list[Request]) -> None:
        """Replaces the requests by `requests`, which must be sorted by their places."""
        self.by_place = requests

    def _index(self, request: Request) -> int | None:
        index = bisect_left(self.by_place, _place_of(request), key=_place_of)
        is_there = index < len(self.by_place) and self.by_place[index] is request
        return index if is_there else None


def _place_of(request: Request) -> tuple[int, int]:
    """Returns the key by which requests are sorted: the place, and then the number in the order of
    arrival. After a loss, two requests may have the same place, if they got their places in
    different pipelines."""
    return request.place, request.arrival
