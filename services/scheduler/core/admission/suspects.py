"""Suspects: the requests that were in flight when a pipeline was lost, until they are cleared.

Each suspect may have caused the loss of the pipeline. Suspects are admitted before all other
requests and one at a time, the most suspicious first. The next suspect is admitted when every
running request has produced tokens and the last suspect is cleared. So the next loss is blamed on
the only suspect in flight, and a request that is blamed again runs alone the next time.
"""

from collections.abc import Collection, Iterable, Sequence

from services.scheduler.core.request import MAX_LOSSES, Request, RequestId


class Suspects:
    """The waiting suspects of one pool, and the suspect on probation, which was admitted last."""

    def __init__(self) -> None:
        self._waiting: dict[Request, None] = {}
        self._on_probation: Request | None = None  # the suspect that was admitted last

    def add(self, request: Request) -> None:
        """Notes a waiting request, if the request is a suspect."""
        if request.is_suspect:
            self._waiting[request] = None

    def admit(self, request: Request) -> None:
        """Notes that a waiting request is admitted. A suspect is on probation from then on."""
        if request.is_suspect:
            del self._waiting[request]
            self._on_probation = request

    def remove(self, request: Request) -> None:
        """Notes that a waiting request has left the pool."""
        self._waiting.pop(request, None)

    def reset(self, waiting: Iterable[Request]) -> None:
        """Replaces the waiting suspects by the suspects in `waiting`, the requests that wait after
        a loss."""
        self._waiting = {request: None for request in waiting if request.is_suspect}

    def are_in(self, admitted: Collection[Request]) -> bool:
        """Returns whether any suspect waits, or is among the admitted requests."""
        return bool(self._waiting) or self._is_probation(admitted)

    def may_be_admitted(self, admitted: Collection[Request]) -> Sequence[Request] | None:
        """Returns the only waiting requests that may be admitted. Returns None if all waiting
        requests may be admitted."""
        if self._is_probation(admitted):
            return ()
        if not self._waiting:
            return None
        if any(request.n_new_tokens == 0 for request in admitted):
            return ()
        return (max(self._waiting, key=_suspicion),)

    def _is_probation(self, admitted: Collection[Request]) -> bool:
        suspect = self._on_probation
        return suspect is not None and suspect.is_suspect and suspect in admitted


def _suspicion(request: Request) -> tuple[int, int]:
    return (request.n_losses, -request.arrival)


def suspect(in_flight: Sequence[Request], culprits: Collection[RequestId]) -> None:
    """Makes suspects of the requests that were in flight at a loss. If some of these requests were
    suspects before, only these become more suspicious. If the culprits are known, no request
    becomes a suspect."""
    for request in [one for one in in_flight if one.is_suspect] or in_flight:
        request.n_losses += not culprits


def verdict(request: Request, culprits: Collection[RequestId]) -> str | None:
    """Returns the reason, for people to read, why a request ends with the loss of a pipeline.
    Returns None if the request goes on."""
    if request.request_id in culprits:
        return "the model's numbers for this request are not finite"
    if request.n_losses >= MAX_LOSSES:
        return f"the pipeline was lost {MAX_LOSSES} times in a row serving this request"
    return None
