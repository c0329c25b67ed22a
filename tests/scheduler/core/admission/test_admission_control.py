"""Admission control as a control loop: overloaded schedulers on a simulated clock."""

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission.admission_control import MAX_ALLOWANCE
from services.scheduler.core.admission.backlog import NOTHING, Backlog, WaitingWork
from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.admission.forecast import Forecast, Machine
from services.scheduler.core.admission.forecasts import Forecasts
from services.scheduler.core.admission.iteration_time import N_NEEDED, IterationTime
from services.scheduler.core.admission.prompt_groups import NO_PROMPT_GROUPS, PromptGroups
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.request import TOKEN_ID, FinishReason, Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from tests.scheduler.core.admission.overload import Caller, Engine, Outcome, goodput, poisson

Make = Callable[[float, random.Random], Caller]


def same(at: float, chance: random.Random) -> Caller:
    """One whose output is as long as all others."""
    return Caller(at, 16, 64, 64)


def uniform(at: float, chance: random.Random) -> Caller:
    """One whose output may be of any length."""
    return Caller(at, 16, chance.randint(1, 128), 128)


def exponential(at: float, chance: random.Random) -> Caller:
    """One whose output is mostly far shorter than it may be, and ends at any time."""
    return Caller(at, 16, min(512, 1 + int(chance.expovariate(1 / 64))), 512)


def prompts(at: float, chance: random.Random) -> Caller:
    """One with a long prompt and hardly an output."""
    return Caller(at, 300, 4, 4)


CAPACITY: dict[Make, float] = {same: 11.4, uniform: 11.4, exponential: 11.5, prompts: 5.2}
"""Requests a second that an engine serves which is never without."""

WARM_S, LOAD_S = 12.0, 24.0


def overloaded(
    make: Make,
    times: float,
    goal_s: float | None,
    slowness: tuple[float, ...] = (1.0,),
    seed: int = 3,
) -> Engine:
    """Returns an engine after some time at four fifths of its capacity, and some at more."""
    engine = Engine(goal_s, slowness=slowness)
    rate = CAPACITY[make] * sum(1 / factor for factor in slowness)
    callers = list(poisson(0.8 * rate, WARM_S, make, seed=4))
    for caller in poisson(times * rate, LOAD_S, make, seed=seed):
        callers.append(replace(caller, at=caller.at + WARM_S))
    engine.run(callers, until=WARM_S + LOAD_S)
    return engine


watched = cache(overloaded)


@pytest.mark.parametrize("goal_s", [4.0, pytest.param(1.0, marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize("make", CAPACITY, ids=lambda make: make.__name__)
def test_at_ten_times_the_load_nothing_is_idle_and_nearly_all_are_on_time(
    make: Make, goal_s: float
) -> None:
    outcomes = watched(make, 10, goal_s).outcomes
    since, until = WARM_S + 4, WARM_S + LOAD_S
    assert min(one.n_waiting for one in outcomes if one.caller.at > since) > 0
    n_ended = sum(one.ended_at is not None and one.ended_at > since for one in outcomes)
    on_time = goodput(outcomes, goal_s, since=since, until=until) * (until - since)
    assert on_time > 0.85 * n_ended


@pytest.mark.parametrize(
    ("make", "slowness"),
    [
        (uniform, (1.0, 1.0)),
        (prompts, (1.0, 4.0)),
        pytest.param(uniform, (1.0, 4.0), marks=pytest.mark.thorough),
        pytest.param(prompts, (1.0, 1.0, 1.0), marks=pytest.mark.thorough),
        pytest.param(exponential, (1.0, 1.0, 2.0), marks=pytest.mark.thorough),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
@pytest.mark.thorough
def test_several_pipelines_are_as_good_as_one_at_its_part_of_the_load(
    make: Make, slowness: tuple[float, ...]
) -> None:
    # Of answers of very unequal lengths, twenty seconds have too few for one sample: single samples
    # differ by a fifth, with any placement.
    seeds = (3, 13, 23) if make is exponential else (3,)
    goal_s, since, until = 4.0, WARM_S + 4, WARM_S + LOAD_S

    def goodput_of(outcomes: Sequence[Outcome]) -> float:
        return goodput(outcomes, goal_s, since=since, until=until)

    one = watched(make, 10, goal_s)
    several = [overloaded(make, 10, goal_s, slowness, seed).outcomes for seed in seeds]
    n_times = sum(1 / factor for factor in slowness)
    assert mean(map(goodput_of, several)) > 0.9 * n_times * goodput_of(one.outcomes)
    ratios = sorted(
        outcome.wait_s / outcome.foretold_s
        for outcome in chain.from_iterable(several)
        if outcome.caller.at > since and outcome.wait_s is not None and outcome.foretold_s
    )
    assert 0.75 < ratios[len(ratios) // 2] < 1.25


def test_waiting_work_is_divided_by_the_speed_of_the_pipelines() -> None:
    forecasts = Forecasts(ExpectedOutput())
    opened = []
    for token_s in (0.001, 0.003):
        kv_manager = KVManager(n_blocks=4096, block_size=16)
        pool = RequestPool(max_requests=8)
        opened.append(forecasts.open(Machine(pool, kv_manager, 8, NO_PROMPT_GROUPS)))
        for n_new in [10, 1010] * N_NEEDED:
            time_s = token_s * n_new
            opened[-1].learn_iteration(n_spans=1, n_tokens=n_new + 1, n_new=1, time_s=time_s)
    before = WaitingWork(4, 4000, 0)
    assert forecasts.first_token_s(before, NOTHING, 0.0) == pytest.approx(3.0, rel=0.05)
    forecasts.close(opened[1])
    assert forecasts.first_token_s(before, NOTHING, 0.0) == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("make", [uniform, exponential], ids=lambda make: make.__name__)
def test_nearly_all_are_on_time_for_clients_whose_tokens_are_on_their_way_for_a_while(
    make: Make,
) -> None:
    goal_s, way_s = 4.0, 0.2
    began = [
        one.wait_s
        for one in watched(make, 10, goal_s).outcomes
        if one.wait_s is not None and one.caller.at > WARM_S
    ]
    n_on_time = sum(wait_s + way_s <= goal_s for wait_s in began)
    assert n_on_time > 0.95 * len(began)


def test_without_a_goal_all_wait_and_hardly_anybody_is_on_time() -> None:
    engine = overloaded(uniform, 4, None)
    assert all(one.retry_after_s is None for one in engine.outcomes)
    assert goodput(engine.outcomes, 4.0, since=WARM_S + 5, until=WARM_S + LOAD_S) < 1


@pytest.mark.parametrize("make", [uniform, exponential], ids=lambda make: make.__name__)
def test_refusals_do_not_swing_between_everybody_and_nobody(make: Make) -> None:
    engine = watched(make, 10, 4.0)
    late = [one for one in engine.outcomes if one.caller.at > WARM_S + LOAD_S / 2]
    waiting = [one.n_waiting for one in late]
    assert min(waiting) > 0.6 * max(waiting)
    assert abs(engine.control.allowance_s) < MAX_ALLOWANCE * 4.0


def test_who_comes_back_a_little_after_he_was_told_is_taken() -> None:
    engine = overloaded(uniform, 10, 4.0)
    retry_after_s = engine.outcomes[-1].retry_after_s
    assert retry_after_s is not None
    back = Caller(engine.now + retry_after_s + 0.2, 16, 64, 128)
    engine.run([back])
    assert engine.outcomes[-1].retry_after_s is None
    wait_s = engine.outcomes[-1].wait_s
    assert wait_s is not None
    assert 2.0 < wait_s < 5.0


def test_nobody_is_refused_before_anything_is_known() -> None:
    engine = Engine(0.1)
    engine.run([Caller(0.0, 16, 512, 512)] * 500, until=engine.base_s)
    assert all(one.retry_after_s is None for one in engine.outcomes)


def test_what_runs_already_tells_that_outputs_are_long() -> None:
    engine = Engine(4.0)
    engine.run(list(poisson(100, 5.0, lambda at, _: Caller(at, 16, 500, 500), seed=1)), until=5.0)
    assert all(one.ended_at is None for one in engine.outcomes)
    assert sum(one.retry_after_s is not None for one in engine.outcomes) > 100


callers = st.builds(
    Caller,
    at=st.floats(0, 4),
    n_prompt=st.integers(1, 100),
    n_output=st.integers(1, 60),
    max_tokens=st.just(60),
    client=st.sampled_from([None, "a", "b"]),
    priority=st.integers(-1, 1),
    time_left=st.none() | st.floats(0.5, 5),
)


@given(callers=st.lists(callers, min_size=20, max_size=120), is_fair=st.booleans())
def test_on_random_traces_nobody_is_refused_before_whom_nobody_waits_and_all_end(
    callers: list[Caller], is_fair: bool
) -> None:
    engine = Engine(0.2, is_fair=is_fair, max_batch_size=2)
    outcomes = engine.run(callers)
    for one in outcomes:
        if one.retry_after_s is None:
            assert one.reason is not None
        else:
            assert one.n_waiting > 0
            assert one.retry_after_s > 0
    assert len(engine.control.backlog) == 0
    assert engine.control.backlog.work == NOTHING
    assert not engine.control._foretold


def flooded(second: Caller) -> Outcome:
    """Returns the fate of one who comes while another sends more than there is room for."""
    engine = Engine(1.0, is_fair=True)
    flood = [replace(caller, client="flood") for caller in poisson(100, 20, uniform, seed=2)]
    outcomes = engine.run([*flood, second])
    refused = [one for one in outcomes if one.retry_after_s is not None]
    assert len(refused) > 1000
    [fate] = [one for one in outcomes if one.caller is second]
    return fate


def test_a_flood_of_one_client_is_refused_and_not_another_client() -> None:
    fate = flooded(Caller(15.0, 16, 64, 128, client="other"))
    assert fate.wait_s is not None
    assert fate.wait_s < 1.0


def test_a_flood_is_refused_and_not_who_is_more_important() -> None:
    fate = flooded(Caller(15.0, 16, 64, 128, client="flood", priority=-1))
    assert fate.wait_s is not None
    assert fate.wait_s < 1.0


def test_who_cannot_begin_in_the_time_that_it_has_is_refused_though_there_is_no_goal() -> None:
    engine = overloaded(uniform, 2, None)
    hurried = Caller(engine.now, 16, 4, 128, time_left=1.0)
    patient = Caller(engine.now, 16, 4, 128, time_left=1000.0)
    engine.run([hurried, patient])
    assert [one.retry_after_s is not None for one in engine.outcomes[-2:]] == [True, False]


def test_who_can_no_longer_begin_in_time_is_ended_before_its_time_is_up() -> None:
    engine = overloaded(uniform, 2, None)
    # The request is admitted before a stall that could not be foreseen.
    victim = Caller(engine.now, 16, 4, 128, time_left=40.0)
    n_waiting = engine.pool.n_waiting
    assert n_waiting > 200
    engine.run([victim], until=engine.now + 0.1)
    assert engine.outcomes[-1].retry_after_s is None
    engine.now += 35.0
    engine.run([])
    fate = engine.outcomes[-1]
    assert fate.reason is FinishReason.TIMED_OUT
    assert fate.ended_at is not None
    assert fate.ended_at < victim.at + 40.0


def test_what_was_foretold_of_a_pipeline_that_is_gone_teaches_nothing() -> None:
    engine = Engine(4.0)
    request, before_s = request_of(None, 0, 8, False), engine.control.allowance_s
    engine.control.note_submitted(request, 3.9, 0.0)
    engine.control.open(Machine(engine.pool, engine.scheduler.kv_manager, 8, NO_PROMPT_GROUPS))
    engine.control.note_first_token(request, 60.0)
    assert engine.control.allowance_s == before_s


def test_own_tokens_that_a_preempted_request_finds_cached_foretell_nothing_for_others() -> None:
    kv_manager = KVManager(n_blocks=100, block_size=16)
    forecast = Forecast(ExpectedOutput())
    groups = PromptGroups(max_batch_size=8, max_batch_tokens=64)
    forecast.open(Machine(RequestPool(max_requests=9), kv_manager, 8, groups))
    for index in range(2 * N_NEEDED):
        n_tokens = 1 + 63 * (index % 2)
        forecast.learn_iteration(n_spans=1, n_tokens=n_tokens, n_new=1, time_s=0.1 + n_tokens / 1e3)
    own = WaitingWork(1, 1000, 1)
    foretold_s = forecast.first_token_s(NOTHING, own, now=0.0)
    request = Request(RequestId("0"), [1] * 64, 64, n_preemptions=1)
    request.n_prefill_tokens = request.n_cached_tokens = 64
    for _ in range(9):
        forecast.learn_admission(request)
    assert forecast.first_token_s(NOTHING, own, now=1.0) == foretold_s
    request.n_preemptions = 0
    forecast.learn_admission(request)
    assert forecast.first_token_s(NOTHING, own, now=2.0) < foretold_s


def test_who_waits_for_a_row_is_foretold_to_wait() -> None:
    waits = []
    for max_rows in (2, None):
        expected = ExpectedOutput()
        for _ in range(8):
            expected.learn(50, 60)
        forecast = Forecast(expected)
        kv_manager = KVManager(n_blocks=99, block_size=16, max_rows=max_rows)
        groups = PromptGroups(max_batch_size=8, max_batch_tokens=64)
        forecast.open(Machine(RequestPool(max_requests=9), kv_manager, 8, groups))
        for index in range(2 * N_NEEDED):
            forecast.learn_iteration(n_spans=1, n_tokens=1 + index % 2, n_new=1, time_s=0.5)
        waits.append(forecast.first_token_s(WaitingWork(5, 5, 250), WaitingWork(1, 1, 50), 0.0))
    assert waits[0] > 10 * waits[1] > 0


work_of = st.tuples(
    st.sampled_from([None, "a", "b"]), st.integers(-1, 1), st.integers(1, 50), st.booleans()
)


@given(data=st.lists(work_of, max_size=30), new=work_of, is_fair=st.booleans())
def test_a_backlog_counts_what_comes_first(
    data: list[tuple[str | None, int, int, bool]],
    new: tuple[str | None, int, int, bool],
    is_fair: bool,
) -> None:
    backlog = Backlog(ExpectedOutput(), is_fair=is_fair)
    requests = [request_of(*one) for one in data]
    for request, (*_, has_begun) in zip(requests, data, strict=True):
        backlog.add(request, has_begun=has_begun)
    before = backlog.before(request_of(*new))
    must = [one for one in data if one[3] or (is_fair and one[1] < new[1])]
    may = [one for one in data if one[3] or not is_fair or one[1] <= new[1]]
    assert len(must) - 1e-6 <= before.n_requests <= len(may) + 1e-6
    if not is_fair:
        assert before.n_requests == pytest.approx(len(data))
        assert before.n_prompt_tokens == pytest.approx(sum(one[2] for one in data))
    for request in requests:
        backlog.remove(request)
    assert backlog.work == NOTHING


def request_of(client: str | None, priority: int, n_prompt: int, has_begun: bool) -> Request:
    limits = AccountLimits(weight=3.0 if client == "b" else 1.0)
    account = None if client is None else AccountUse(limits, name=client)
    return Request(RequestId("r"), [1] * n_prompt, 8, account=account, priority=priority)


def test_weights_say_how_much_comes_first() -> None:
    accounts = [AccountUse(AccountLimits(weight=weight), name=str(weight)) for weight in (1.0, 3.0)]
    backlog = Backlog(ExpectedOutput(), is_fair=True)
    for _ in range(100):
        for account in accounts:
            backlog.add(Request(RequestId("r"), [1] * 10, 8, account=account))
    light, heavy = [
        backlog.before(Request(RequestId("r"), [1] * 10, 8, account=account))
        for account in accounts
    ]
    assert light.n_requests == pytest.approx(200)
    assert heavy.n_requests == pytest.approx(100 * 4 / 3, rel=0.02)


def test_iterations_cost_a_base_and_something_for_each_token_of_prompts() -> None:
    time = IterationTime()
    chance = random.Random(1)
    assert not time.is_known
    for _ in range(10 * N_NEEDED):
        n_tokens = chance.choice([0, 0, 0, 200, 500])
        time.learn(n_tokens, 0.01 + 0.0002 * n_tokens + chance.uniform(0, 0.001))
    assert time.is_known
    assert time.base_s == pytest.approx(0.0105, rel=0.1)
    assert time.token_s == pytest.approx(0.0002, rel=0.05)
    time.learn(0, 60.0)  # a machine that was asleep
    assert time.base_s < 0.012


def test_outputs_are_expected_by_how_long_they_may_be() -> None:
    expected = ExpectedOutput()
    for _ in range(100):
        expected.learn(16, 16)
        expected.learn(400, 4000)
    assert expected.n_tokens(16) == pytest.approx(16)
    assert expected.n_tokens(4000) == pytest.approx(400)
    assert expected.n_tokens(100) == 100  # not known: this is the most that can come
    assert expected.variation(16) == pytest.approx(0, abs=1e-6)
    begun = Request(RequestId("r"), [1], 16, generated_token_ids=array(TOKEN_ID, [1] * 10))
    assert expected.n_left(begun) == pytest.approx(6)


def test_work_is_charged_as_by_the_fair_order() -> None:
    assert WaitingWork(1, 10, 5).charge == 20
