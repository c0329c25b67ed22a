"""Runs an entrant in virtual time: the real scheduling core on a simulated machine whose costs are
known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

from services.arena.entrants import Entrant
from services.arena.figures import Figures
from services.arena.referee import RefereedScheduler, Stopped, TimedPolicy
from services.arena.setup import Setup
from services.scheduler.core.policies import LengthPredictor, Policy
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from simulator.engine import Arrival, Simulation
from simulator.outcome import Outcome
from simulator.site import OnePool
from simulator.virtual_clock import VirtualClock

Around = Callable[[Policy], Policy]


class NoisyPredictor:
    """Predicts the length of each output: the true length with a random error."""

    def __init__(self, lengths: Mapping[str, int], *, error: float, seed: int) -> None:
        """`lengths` has the number of output tokens of each request, by id. `error` is the standard
        deviation of the logarithm of a prediction divided by the true length."""
        chance = Random(f"predictions {seed}")
        self._predicted = {
            name: n * chance.lognormvariate(0.0, error) for name, n in lengths.items()
        }

    def learn(self, n_generated: int, max_new_tokens: int) -> None:
        """Does nothing: predictions do not depend on earlier requests."""

    def n_left(self, request: Request) -> float:
        """Returns the predicted number of tokens that a request has yet to generate, at least 1."""
        n_left = self._predicted[request.request_id] - len(request.generated_token_ids)
        return max(1.0, n_left)


def run(
    entrant: Entrant,
    setup: Setup,
    arrivals: Sequence[Arrival],
    *,
    predictor: LengthPredictor | None = None,
) -> Figures:
    """Runs an entrant in virtual time, and returns its figures. The requests run twice: once with
    all checks, and once without checks, to measure the processor time of the policy.

    Raises:
        Stopped: the policy broke a rule.
        ValueError: the policy cannot have the options of the setup.
    """
    outcome, referees = _outcome(
        entrant, setup, arrivals, predictor, CheckedPolicy, RefereedScheduler
    )
    n_preemptions = 0
    for scheduler in referees:
        if not isinstance(scheduler, RefereedScheduler):
            raise TypeError("a run is refereed")
        scheduler.check_over()
        n_preemptions += scheduler.n_preemptions
    if len(outcome.requests) != len(arrivals):
        raise Stopped(f"{len(outcome.requests)} of {len(arrivals)} requests have ended")
    n_output = sum(arrival.n_output for arrival in arrivals)
    if outcome.n_output != n_output:
        raise Stopped(f"{outcome.n_output} tokens were returned, and {n_output} belong to requests")
    timed: list[TimedPolicy] = []

    def around(policy: Policy) -> Policy:
        timed.append(TimedPolicy(policy))
        return timed[-1]

    _outcome(entrant, setup, arrivals, predictor, around, Scheduler)
    select_ns = sum(one.select_ns for one in timed)
    n_selections = sum(one.n_selections for one in timed)
    return Figures.of(
        outcome, n_preemptions=n_preemptions, select_us=select_ns / 1e3 / max(1, n_selections)
    )


def capacity(setup: Setup, arrivals: Sequence[Arrival]) -> float:
    """Returns the number of requests per second that the policy `chunked` serves if all requests
    arrive at once."""
    at_once = [_at(arrival, 0.0) for arrival in arrivals]
    outcome, _ = _outcome(Entrant("chunked", "fcfs"), setup, at_once, None, _bare, Scheduler)
    return outcome.requests_per_s


def scaled(arrivals: Sequence[Arrival], *, rate: float) -> list[Arrival]:
    """Returns the requests with their times of arrival multiplied by a factor, so that `rate`
    requests arrive per second on average. The first one arrives at 0. If all requests arrive at
    once, they are returned unchanged."""
    span_s = arrivals[-1].time_s - arrivals[0].time_s
    if not span_s:
        return list(arrivals)
    factor = (len(arrivals) - 1) / rate / span_s
    return [_at(one, factor * (one.time_s - arrivals[0].time_s)) for one in arrivals]


def _at(arrival: Arrival, time_s: float) -> Arrival:
    return replace(arrival, time_s=time_s)


def _bare(policy: Policy) -> Policy:
    return policy


def _outcome(
    entrant: Entrant,
    setup: Setup,
    arrivals: Sequence[Arrival],
    predictor: LengthPredictor | None,
    around: Around,
    make: type[Scheduler],
) -> tuple[Outcome, list[Scheduler]]:
    clock = VirtualClock()
    pools = setup.pools(entrant, clock)
    policies = [around(setup.policy(entrant, predictor)) for _ in pools]
    made = setup.schedulers(entrant, pools, policies, clock, make)
    site = OnePool([learning for _, learning in made], pools)
    outcome = Simulation(site, setup.costs, arrivals, clock=clock).run()
    return outcome, [scheduler for scheduler, _ in made]
