"""Admission control: a request whose first token would come too late is refused at once.

The first token is too late if it comes after the goal that all requests share, where there is one,
or after the request's own deadline. The client of a refused request may try another server, or try
again after the time that the error names. Without admission control all requests would wait, and at
ten times the capacity nearly all of them would wait in vain. A request is never refused while no
other request waits before it, nor before enough is known for a forecast. A request that was
accepted is not refused later.

A forecast may be wrong, mostly in the same direction for a while. So the goal is compared with the
forecast plus an allowance. The allowance is learned such that 99 of 100 first tokens come no later
than forecast plus allowance. It moves a little with each first token, and is never more than half
of the goal, so that the allowance alone cannot make all requests late. A tenth of the goal is left
for the network and the frontend, whose delays are not known here: under overload an accepted
request waits nearly as long as the goal allows, and these delays would make it late. This reserve
costs no throughput, because requests are refused only while others wait.

Points in time are given by the caller, in seconds.
"""

from services.common.errors import PoolFull
from services.scheduler.core.admission.backlog import NOTHING, Backlog
from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.admission.forecast import Forecast, Machine
from services.scheduler.core.admission.forecasts import Forecasts
from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request

RETRY_AFTER_S = 0.001
"""Smallest number of seconds after which a refused client is asked to try again."""

ON_TIME = 0.99
"""Fraction of first tokens that should come no later than forecast plus allowance."""

STEP = 1 / 32
"""Largest change of the allowance after the first token of one request, as a fraction of the
goal."""

TELLING = 0.5
"""The allowance learns only from forecasts of at least this fraction of the longest forecast with
which a request is accepted."""

STEADINESS = 1 / 8
"""A step of the allowance is divided by 1 + n `STEADINESS`, where n is the number of requests in
the pool that have a forecast and no first token yet."""

FIRST_ALLOWANCE = 1 / 8
"""The allowance before anything is learned, as a fraction of the goal."""

MAX_ALLOWANCE = 0.5
"""Largest absolute value of the allowance, as a fraction of the goal. The allowance may be
negative."""

WAYS = 0.1
"""Fraction of the goal that is left for the frontend and the network, in both directions."""

LOOK_S = 0.25
"""Seconds between two checks of the waiting requests that have a deadline."""

N_LOOKED_AT = 1024
"""Largest number of forecasts that one check makes for waiting requests, in their order. For each
request it makes one forecast for each pipeline."""

SURELY = 0.5
"""Fraction of a forecast, to allow for errors: a waiting request is given up only if waiting for
this fraction of its forecast would already make it late."""


class TooLate(PoolFull):
    """Error: the first token of the request would come too late."""

    def __init__(self, message: str, *, retry_after_s: float, account_s: float = 0.0) -> None:
        """`account_s` is a time in seconds. During this time, every request of the same account
        with the same or a lower priority would be too late, however short it is."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.account_s = account_s


class AdmissionControl:
    """Decides whether a request that arrives may wait, or is refused because its first token would
    come too late."""

    def __init__(
        self,
        *,
        goal_s: float | None,
        is_fair: bool,
        vectors_yield: bool = False,
    ) -> None:
        """`goal_s` is the time in seconds within which requests should have their first tokens.
        With None, only the deadlines of requests count. `is_fair` says whether the waiting requests
        are ordered by priorities and clients, and `vectors_yield` whether requests that generate
        tokens come before requests for vectors (embeddings, scores)."""
        self.goal_s = goal_s
        self.allowance_s = 0.0 if goal_s is None else FIRST_ALLOWANCE * goal_s
        """The allowance: seconds that are added to each forecast."""
        self.expected = ExpectedOutput()
        """Learned lengths of the outputs of requests."""
        self.backlog = Backlog(self.expected, is_fair=is_fair, vectors_yield=vectors_yield)
        """The work that waits; the pool keeps the backlog up to date."""
        self.forecasts = Forecasts(self.expected)
        """Learned speeds of the pipelines, and the forecasts that follow from them."""
        # For each request, the time at which its forecast was made, and the forecast in seconds.
        self._foretold: dict[Request, tuple[float, float]] = {}
        self._look_at = 0.0
        self._vectors_yield = vectors_yield

    def open(self, machine: Machine) -> Forecast:
        """Adds a pipeline whose speed is not known yet, and returns the pipeline's forecast. Drops
        the forecasts of all requests, because they were made without this pipeline."""
        self._foretold.clear()
        return self.forecasts.open(machine)

    def close(self, forecast: Forecast) -> None:
        """Removes a pipeline. Drops the forecasts of all requests, because they were made with this
        pipeline."""
        self._foretold.clear()
        self.forecasts.close(forecast)

    def check(self, request: Request, now: float) -> float:
        """Checks that the first token of a request would come in time. Returns the forecast of the
        seconds until that token. Returns 0 if no other request waits before it, if there is no
        forecast, or if there is neither a goal nor a deadline of the request.

        Raises:
            TooLate: the first token would come too late. The error says when to try again.
        """
        if self.goal_s is None and request.deadline is None:
            return 0.0
        before = self.backlog.before(request)
        if before.n_requests < 1 or not self.forecasts.is_known:
            return 0.0
        others_s = self.forecasts.first_token_s(before, NOTHING, now)
        wait_s = self.forecasts.first_token_s(before, self.backlog.work_of(request), now)
        over_s = 0.0 if request.deadline is None else now + others_s - request.deadline
        account_s = 0.0
        if self.goal_s is not None:
            goal_s = self._longest_wait_s(self.goal_s)
            if wait_s - others_s > goal_s:  # no request of its length would ever be taken
                wait_s = others_s
            over_s = max(over_s, wait_s - goal_s)
            account_s = max(0.0, others_s - goal_s)
        if over_s > 0:
            raise TooLate(
                f"the first token would come after about {wait_s:.2g} s, which is too late",
                retry_after_s=max(RETRY_AFTER_S, over_s),
                account_s=account_s,
            )
        return wait_s

    def note_waiting(self, request: Request, *, has_begun: bool) -> None:
        """Notes that a request waits. `has_begun` says that the request has run before, so that it
        comes before requests that have not."""
        self.backlog.add(request, has_begun=has_begun)

    def note_not_waiting(self, request: Request) -> None:
        """Notes that a request no longer waits: the request is admitted, or has ended."""
        self.backlog.remove(request)

    def note_submitted(self, request: Request, wait_s: float, now: float) -> None:
        """Notes that a request is in the pool. `wait_s` is the forecast that `check` returned for
        the request."""
        if self.goal_s is None:
            return
        if wait_s > TELLING * self._longest_wait_s(self.goal_s):
            self._foretold[request] = now, wait_s

    def note_first_token(self, request: Request, now: float) -> None:
        """Notes that a request has its first token. Raises the allowance if the token came later
        than its forecast plus the allowance. Otherwise lowers the allowance."""
        foretold = self._foretold.pop(request, None)
        if foretold is None or self.goal_s is None:
            return
        then, wait_s = foretold
        is_later = now - then > wait_s + self.allowance_s
        # The effect of this step shows when all requests in `_foretold` have their first tokens.
        step_s = self.goal_s * STEP / (1 + STEADINESS * len(self._foretold))
        self.allowance_s += step_s * (ON_TIME if is_later else ON_TIME - 1)
        most = MAX_ALLOWANCE * self.goal_s
        self.allowance_s = min(max(-most, self.allowance_s), most)

    def _longest_wait_s(self, goal_s: float) -> float:
        """Returns the longest forecast with which a request is accepted."""
        return (1 - WAYS) * goal_s - self.allowance_s

    def note_end(self, request: Request) -> None:
        """Drops the forecast of a request that has ended or will be computed again by another
        pipeline."""
        self._foretold.pop(request, None)

    def hopeless(self, now: float, earliest_deadline: float, order: Order) -> list[Request]:
        """Returns the waiting requests that can no longer begin before their deadlines.
        `earliest_deadline` is the earliest deadline that any of them may have. Returns an empty
        list if the last check was less than `LOOK_S` ago, or if there is no forecast."""
        if now < self._look_at or not self.forecasts.is_known:
            return []
        self._look_at = now + LOOK_S
        whole_s = self.forecasts.first_token_s(self.backlog.work, NOTHING, now)
        if now + SURELY * whole_s <= earliest_deadline:
            return []
        result: list[Request] = []
        before = NOTHING
        for index, request in enumerate(order.line_up(())):
            if index == N_LOOKED_AT // len(self.forecasts):
                break
            own = self.backlog.work_of(request)
            if request.deadline is not None and before.n_requests:
                wait_s = self.forecasts.first_token_s(before, own, now)
                if now + SURELY * wait_s > request.deadline:
                    result.append(request)
                    continue
            if not (self._vectors_yield and request.wants_vector):
                before = before.plus(own)
        return result
