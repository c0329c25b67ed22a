"""Suspects: the requests that were in flight when a pipeline was lost, until they are cleared.

Each suspect may have caused the loss. Most losses have other causes, such as a node or a link that
is lost, so after the first loss of this kind all suspects go on at once. After the second one in a
row, and after the first loss at which a rank failed by itself, suspects are on trial: they are
admitted before all other requests and one at a time, the most suspicious first. The next one is
admitted when every running request has produced tokens and the last one is cleared. So the next
loss is blamed on the only suspect in flight, and a request that is blamed again runs alone the next
time.

How soon a suspect fails depends on how the pipelines were lost. A rank that fails by itself, by an
error or a signal such as SIGSEGV, was most likely ended by what it computed: the suspect fails at
the second such loss (`MAX_DEATHS`), also if losses of another kind lie between the two. A loss of
any other kind, as of a node or a link or by SIGKILL, may have nothing to do with the suspect, which
fails at the fourth loss in a row (`MAX_LOSSES`).
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from services.scheduler.core.request import MAX_DEATHS, MAX_LOSSES, Request

NOT_FINITE = "the model's numbers for this request are not finite"
"""Reason, for people to read, why a request fails for which the model computed numbers that are not
finite."""


class Suspects:
    """Lets a pipeline admit suspects that need a trial only one at a time. All pipelines share the
    waiting suspects. The suspect on trial is the one that the pipeline admitted last."""

    def __init__(
        self,
        waiting: dict[Request, None] | None = None,
        fits: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        """`waiting`, if given, are the waiting suspects that need a trial; other pipelines share
        this dictionary. `fits` returns whether the pipeline could ever run a request. Suspects that
        the pipeline could never run do not keep its other requests waiting."""
        self._waiting = {} if waiting is None else waiting
        self._fits = fits
        self._on_trial: Request | None = None  # the suspect that was admitted last

    def add(self, request: Request) -> None:
        """Notes a waiting request, if the request needs a trial."""
        if request.needs_trial:
            self._waiting[request] = None

    def admit(self, request: Request) -> None:
        """Notes that a waiting request is admitted. If it needs a trial, it is on trial from then
        on."""
        if request.needs_trial:
            del self._waiting[request]
            self._on_trial = request

    def remove(self, request: Request) -> None:
        """Notes that a waiting request has left the pool."""
        self._waiting.pop(request, None)

    def reset(self, waiting: Iterable[Request]) -> None:
        """Replaces the waiting suspects after a loss. `waiting` are all waiting requests; those
        that need a trial become the waiting suspects."""
        self._waiting.clear()
        self._waiting.update({request: None for request in waiting if request.needs_trial})

    def are_in(self, admitted: Collection[Request]) -> bool:
        """Returns whether any suspect that fits this pipeline waits for its trial, or a suspect is
        on trial. `admitted` are the requests that the pipeline has admitted."""
        return any(map(self._fits, self._waiting)) or self._is_trial(admitted)

    def may_be_admitted(self, admitted: Collection[Request]) -> Sequence[Request] | None:
        """Returns the only waiting requests that may be admitted: at most one suspect. Returns None
        if all waiting requests may be admitted. `admitted` are the requests that the pipeline has
        admitted."""
        if self._is_trial(admitted):
            return ()
        waiting = [request for request in self._waiting if self._fits(request)]
        if not waiting:
            return None
        if any(request.n_new_tokens == 0 for request in admitted):
            return ()
        return (max(waiting, key=_suspicion),)

    def _is_trial(self, admitted: Collection[Request]) -> bool:
        suspect = self._on_trial
        return suspect is not None and suspect.needs_trial and suspect in admitted


def _suspicion(request: Request) -> tuple[int, int]:
    return (request.n_losses, -request.arrival)


def suspect(held: Sequence[Request], *, is_by_itself: bool) -> None:
    """Makes suspects of the requests that were in flight at a loss. If some of these requests were
    suspects before, only these become more suspicious. `is_by_itself` says that a rank failed by
    itself, by an error or a signal."""
    for request in [one for one in held if one.is_suspect] or held:
        request.n_losses += 1
        request.n_deaths += is_by_itself


def verdict(request: Request) -> str | None:
    """Returns the reason, for people to read, why a request ends with the loss of a pipeline; None
    if the request goes on."""
    if request.n_deaths >= MAX_DEATHS:
        return f"a worker failed {MAX_DEATHS} times while it computed this request"
    if request.n_losses >= MAX_LOSSES:
        return f"a pipeline was lost {MAX_LOSSES} times in a row while it computed this request"
    return None
