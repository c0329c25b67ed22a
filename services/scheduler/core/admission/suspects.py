"""Suspects: the requests that were in flight when a pipeline was lost, until they are cleared.

Each of them may have ended the pipeline. Suspects are admitted before all other requests and one at
a time, the most suspicious first, each when every running request has tokens and the last suspect
is cleared. So a loss is blamed on the one suspect in flight, and a request that is blamed again
runs alone the next time.
"""

from collections.abc import Collection, Iterable, Sequence

from services.scheduler.core.request import MAX_LOSSES, Request, RequestId


class Suspects:
    """The suspects of one pool that wait, and the one that is on probation."""

    def __init__(self) -> None:
        self._waiting: dict[Request, None] = {}
        self._on_probation: Request | None = None  # the suspect that was admitted last

    def add(self, request: Request) -> None:
        """Notes that a request waits."""
        if request.is_suspect:
            self._waiting[request] = None

    def admit(self, request: Request) -> None:
        """Notes that a request that has waited is admitted."""
        if request.is_suspect:
            del self._waiting[request]
            self._on_probation = request

    def remove(self, request: Request) -> None:
        """Notes that a request that has waited is gone."""
        self._waiting.pop(request, None)

    def reset(self, waiting: Iterable[Request]) -> None:
        """Begins anew with the requests that wait after a loss."""
        self._waiting = {request: None for request in waiting if request.is_suspect}

    def are_in(self, admitted: Collection[Request]) -> bool:
        """Returns whether suspects wait or are among the admitted requests."""
        return bool(self._waiting) or self._is_probation(admitted)

    def may_be_admitted(self, admitted: Collection[Request]) -> Sequence[Request] | None:
        """Returns the waiting requests that may be admitted; None if all may."""
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
    """Makes the requests that were in flight at a loss suspects; only the suspects among them if
    there were any, and none if the culprits are known."""
    for request in [one for one in in_flight if one.is_suspect] or in_flight:
        request.n_losses += not culprits


def verdict(request: Request, culprits: Collection[RequestId]) -> str | None:
    """Returns why a request ends with the loss of a pipeline, for people; None if it goes on."""
    if request.request_id in culprits:
        return "the model's numbers for this request are not finite"
    if request.n_losses >= MAX_LOSSES:
        return f"the pipeline was lost {MAX_LOSSES} times in a row serving this request"
    return None
