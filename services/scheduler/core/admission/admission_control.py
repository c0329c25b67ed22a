"""Admission control: who would have its first token too late is refused at once.

Too late is after the goal that all requests have, where there is one, or after its own time is up.
Who is refused may ask elsewhere, or when the forecast says; without it, all who come would wait, at
ten times the capacity nearly all of them in vain. Nobody is refused before whom nobody waits, nor
before enough is known; and who has been taken stays.

A forecast may be off, mostly in the same direction for a while. So the goal is compared with the
forecast and an allowance, by which 99 of 100 first tokens have come no later. It moves a little
with each first token, and is never more than half of the goal, so that it cannot by itself make
everybody late. A tenth of the goal is left for the ways from the client and back, of which nothing
is known here: who is taken under overload waits for nearly as long as he may, and would be late by
whatever these take. It costs nothing while somebody waits.

Points in time are given by the caller, in seconds.
"""

from services.common.errors import PoolFull
from services.scheduler.core.admission.backlog import NOTHING, Backlog
from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.admission.forecast import Forecast, Machine
from services.scheduler.core.order.order import Order
from services.scheduler.core.request import Request

RETRY_AFTER_S = 0.001
"""Seconds at least after which to try again."""

ON_TIME = 0.99
"""The part of first tokens that come no later than foretold, with the allowance."""

STEP = 1 / 32
"""The part of the goal by which the allowance moves at most with a first token."""

TELLING = 0.5
"""A forecast tells something of the allowance from this part of the longest that is taken on."""

STEADINESS = 1 / 8
"""The more first tokens are foretold, the smaller are the steps, by this part for each."""

FIRST_ALLOWANCE = 1 / 8
"""The part of the goal that the allowance is at first."""

MAX_ALLOWANCE = 0.5
"""The part of the goal that the allowance is at most."""

WAYS = 0.1
"""The part of the goal that is left for the frontend and the network, before and after."""

LOOK_S = 0.25
"""Seconds between looks at those who wait and have a deadline."""

N_LOOKED_AT = 1024
"""Requests that are looked at, in order, at most."""

SURELY = 0.5
"""A request that waits is given up if it would be late even were its wait so much shorter."""


class TooLate(PoolFull):
    """The request would have its first token too late."""

    def __init__(self, message: str, *, retry_after_s: float, account_s: float = 0.0) -> None:
        """`account_s` says for how long the same holds for all requests of its account that are no
        more important, however short they are."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.account_s = account_s


class AdmissionControl:
    """Decides whether a request that comes now may wait."""

    def __init__(
        self,
        *,
        goal_s: float | None,
        is_fair: bool,
    ) -> None:
        """`goal_s` is the time in which requests should have their first tokens; None where only
        their own time counts. `is_fair` says whether the order heeds priorities and clients."""
        self.goal_s = goal_s
        self.allowance_s = 0.0 if goal_s is None else FIRST_ALLOWANCE * goal_s
        """Seconds that forecasts are taken to be too short."""
        self.expected = ExpectedOutput()
        """What is known of the outputs of requests."""
        self.backlog = Backlog(self.expected, is_fair=is_fair)
        """The work that waits; the pool keeps it up to date."""
        self.forecast = Forecast(self.expected)
        """What is known of the pipeline."""
        self._foretold: dict[Request, tuple[float, float]] = {}  # when, and the seconds from then
        self._look_at = 0.0

    def open(self, machine: Machine) -> None:
        """Begins anew with a pipeline: nothing is known of how fast it is, and what was foretold of
        the last one means nothing."""
        self.forecast.open(machine)
        self._foretold.clear()

    def check(self, request: Request, now: float) -> float:
        """Checks that a request would begin in time; returns the seconds that it is foretold to
        wait for its first token, 0 if nothing can be foretold or it may wait for ever.

        Raises:
            TooLate: it would not; says when it might.
        """
        if self.goal_s is None and request.deadline is None:
            return 0.0
        before = self.backlog.before(request)
        if before.n_requests < 1 or not self.forecast.is_known:
            return 0.0
        others_s = self.forecast.first_token_s(before, NOTHING, now)
        wait_s = self.forecast.first_token_s(before, self.backlog.work_of(request), now)
        over_s = 0.0 if request.deadline is None else now + others_s - request.deadline
        account_s = 0.0
        if self.goal_s is not None:
            goal_s = self._longest_wait_s(self.goal_s)
            if wait_s - others_s > goal_s:  # none of its kind would ever be taken
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
        """Notes that a request waits; one that has begun comes before all others."""
        self.backlog.add(request, has_begun=has_begun)

    def note_not_waiting(self, request: Request) -> None:
        """Notes that a request waits no longer: it is admitted, or has ended."""
        self.backlog.remove(request)

    def note_submitted(self, request: Request, wait_s: float, now: float) -> None:
        """Notes that a request is in the pool, of which `check` foretold this."""
        if self.goal_s is None:
            return
        if wait_s > TELLING * self._longest_wait_s(self.goal_s):
            self._foretold[request] = now, wait_s

    def note_first_token(self, request: Request, now: float) -> None:
        """Notes that a request has its first token, and learns from when it was foretold."""
        foretold = self._foretold.pop(request, None)
        if foretold is None or self.goal_s is None:
            return
        then, wait_s = foretold
        is_later = now - then > wait_s + self.allowance_s
        # News of what is decided now comes when all these have their first tokens.
        step_s = self.goal_s * STEP / (1 + STEADINESS * len(self._foretold))
        self.allowance_s += step_s * (ON_TIME if is_later else ON_TIME - 1)
        most = MAX_ALLOWANCE * self.goal_s
        self.allowance_s = min(max(-most, self.allowance_s), most)

    def _longest_wait_s(self, goal_s: float) -> float:
        """Returns the longest wait that may be foretold of a request that is taken."""
        return (1 - WAYS) * goal_s - self.allowance_s

    def note_end(self, request: Request) -> None:
        """Notes that a request has ended, or begins anew with another pipeline."""
        self._foretold.pop(request, None)

    def hopeless(self, now: float, earliest_deadline: float, order: Order) -> list[Request]:
        """Returns those of the requests that wait who can no longer begin before their time is up.
        Nobody's is up before `earliest_deadline`."""
        if now < self._look_at or not self.forecast.is_known:
            return []
        self._look_at = now + LOOK_S
        whole_s = self.forecast.first_token_s(self.backlog.work, NOTHING, now)
        if now + SURELY * whole_s <= earliest_deadline:
            return []
        result: list[Request] = []
        before = NOTHING
        for index, request in enumerate(order.line_up(())):
            if index == N_LOOKED_AT:
                break
            own = self.backlog.work_of(request)
            if request.deadline is not None and before.n_requests:
                wait_s = self.forecast.first_token_s(before, own, now)
                if now + SURELY * wait_s > request.deadline:
                    result.append(request)
                    continue
            before = before.plus(own)
        return result
