"""The fair order, with the real scheduler, pool, memory and policies, in virtual time."""

from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.batch import Batch
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.clients.client import OUTPUT_CHARGE, PROMPT_CHARGE
from services.scheduler.core.order.fair import N_KEPT, Fair
from services.scheduler.core.order.fcfs import FirstComeFirstServed
from services.scheduler.core.order.order import Order
from services.scheduler.core.order.priorities import MAX_PASSES, N_PREFERABLE
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.chunked import ChunkedPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import Request, RequestId, RequestState
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from tests.scheduler.core.invariants import check_batches, check_ends, check_memory
from tests.scheduler.core.workload import Arrival, Driver, arrivals, build, weight_of

AGEING_S = 30.0
N_BLOCKS, BLOCK_SIZE = 24, 4

POLICIES: dict[str, Policy] = {
    "orca": OrcaPolicy(max_batch_size=4),
    "chunked": ChunkedPolicy(max_batch_size=4, max_batch_tokens=6),
}


@dataclass
class Clock:
    """The time, which a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def fair(clock: Clock | None = None) -> Fair:
    """A fair order whose time stands still, unless there is a clock."""
    return Fair(ageing_s=AGEING_S, now=clock or Clock())


def scheduler_with(
    order: Order, *, policy: str = "chunked", pipeline_depth: int = 2, hand_off: bool = True
) -> Scheduler:
    return build(
        max_batch_size=4,
        n_blocks=N_BLOCKS,
        block_size=BLOCK_SIZE,
        pipeline_depth=pipeline_depth,
        token_hand_off=hand_off,
        policy=POLICIES[policy],
        order=order,
    )


def request_of(
    name: str,
    client: str = "",
    *,
    n_prompt: int = 1,
    n_new: int = 1,
    priority: int = 0,
    weight: float = 1.0,
) -> Request:
    account = AccountUse(AccountLimits(weight=weight), name=client) if client else None
    return Request(RequestId(name), [1] * n_prompt, n_new, account=account, priority=priority)


def admitted(pool: RequestPool, n: int) -> list[str]:
    """Admits so many requests one by one, and returns their names; they end at once."""
    names: list[str] = []
    for _ in range(n):
        request = next(pool.selectable())
        pool.mark_running([request], can_run=lambda _: False)
        pool.remove(request)
        names.append(request.request_id)
    return names


# A single client


@pytest.mark.parametrize("policy", POLICIES)
@given(
    requests=arrivals(with_cancellations=True),
    returns=st.lists(st.booleans(), min_size=200, max_size=200),
    pipeline_depth=st.integers(1, 3),
    hand_off=st.booleans(),
    client=st.sampled_from(["", "a"]),
)
def test_a_single_client_is_served_as_it_comes_to_the_batch(
    policy: str,
    requests: list[Arrival],
    returns: list[bool],
    pipeline_depth: int,
    hand_off: bool,
    client: str,
) -> None:
    def batches(order: Order) -> list[list[tuple[int, int, str]]]:
        scheduler = scheduler_with(
            order, policy=policy, pipeline_depth=pipeline_depth, hand_off=hand_off
        )
        driver = Driver(scheduler, requests)
        if client:
            driver.account = AccountUse(AccountLimits(), name=client)
        result = []
        returning = iter(returns)
        while not driver.is_done:
            driver.arrive()
            batch = driver.select()
            if batch is not None:
                result.append([(*s[1:3], str(s.request.request_id)) for s in batch.spans])
            if driver.in_flight and (batch is None or next(returning, True)):
                driver.return_oldest()
        return result

    assert batches(fair()) == batches(FirstComeFirstServed())


# Several clients


@dataclass
class Ledger:
    """Service that clients get by what a driver sees, and whether they are backlogged."""

    driver: Driver
    served: dict[str, float] = field(default_factory=dict)
    ranges: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """The least and the largest difference of two clients while both have been backlogged."""
    largest: float = 0.0
    _n_updates: int = 0

    def note_admissions(self, batch: Batch | None) -> None:
        for span in () if batch is None else batch.spans:
            if span.is_admission:
                self._serve(span.request, PROMPT_CHARGE * span.request.n_prompt_tokens)
        self._look()

    def note_tokens(self) -> None:
        for update in self.driver.updates[self._n_updates :]:
            if update.token_id is not None:
                self._serve(update.request, OUTPUT_CHARGE)
        self._n_updates = len(self.driver.updates)
        self._look()

    def _serve(self, request: Request, service: float) -> None:
        client = self.driver.arrivals[int(request.request_id)].client
        self.served[client] = self.served.get(client, 0.0) + service / weight_of(client)

    def _look(self) -> None:
        backlogged = {
            self.driver.arrivals[int(request.request_id)].client
            for request in self.driver.scheduler.pool
            if request.state is RequestState.INITIATION
        }
        clients = sorted({arrival.client for arrival in self.driver.arrivals})
        for first, second in combinations(clients, 2):
            if not {first, second} <= backlogged:
                self.ranges.pop((first, second), None)
                continue
            difference = self.served.get(first, 0.0) - self.served.get(second, 0.0)
            least, most = self.ranges.get((first, second), (difference, difference))
            least, most = min(least, difference), max(most, difference)
            self.ranges[first, second] = least, most
            self.largest = max(self.largest, most - least)


def largest_difference(
    order: Order, requests: list[Arrival], returns: list[bool], policy: str, depth: int
) -> float:
    """Serves requests to their end, and returns the largest difference in service of two clients
    over any time in which both were backlogged."""
    scheduler = scheduler_with(order, policy=policy, pipeline_depth=depth, hand_off=depth < 3)
    driver = Driver(scheduler, requests)
    ledger = Ledger(driver)
    returning = iter(returns)
    while not driver.is_done:
        driver.arrive()
        ledger.note_admissions(None)
        batch = driver.select()
        ledger.note_admissions(batch)
        check_memory(driver)
        check_batches(driver, max_batch_size=4)
        if driver.in_flight and (batch is None or next(returning, True)):
            driver.return_oldest()
            ledger.note_tokens()
    check_ends(driver)
    return ledger.largest


def bound_of(requests: list[Arrival]) -> float:
    """The bound of VTC's Theorem 4.4: twice max(w_p L_input, w_q M), by the least weight."""
    longest = max(arrival.n_prompt for arrival in requests)
    u = max(PROMPT_CHARGE * longest, OUTPUT_CHARGE * N_BLOCKS * BLOCK_SIZE)
    return 2 * u / min(weight_of(arrival.client) for arrival in requests)


TRACES = {
    "requests": arrivals(with_cancellations=True, clients=("a", "b", "c2", "d0.5"), n_requests=80),
    "returns": st.lists(st.booleans(), min_size=200, max_size=200),
    "policy": st.sampled_from(sorted(POLICIES)),
    "depth": st.integers(1, 3),
}


@given(**TRACES)
def test_backlogged_clients_differ_in_service_by_no_more_than_the_theorem_says(
    requests: list[Arrival], returns: list[bool], policy: str, depth: int
) -> None:
    assert largest_difference(fair(), requests, returns, policy, depth) <= bound_of(requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_first_come_first_served_exceeds_the_bound_where_one_client_asks_for_most(
    policy: str,
) -> None:
    flood = [Arrival(0, n_prompt=8, max_new_tokens=8, n_iterations=8, client="a")] * 100
    small = [Arrival(0, n_prompt=8, max_new_tokens=8, n_iterations=8, client="b")] * 50
    requests = flood + small
    limit = bound_of(requests)
    assert largest_difference(FirstComeFirstServed(), requests, [], policy, 2) > limit
    assert largest_difference(fair(), requests, [], policy, 2) <= limit


def test_the_client_that_has_been_served_least_comes_next() -> None:
    pool = RequestPool(max_requests=100, order=fair())
    for number in range(3):
        pool.add(request_of(f"a{number}", "a", n_prompt=10))
    for number in range(6):
        pool.add(request_of(f"b{number}", "b", n_prompt=5))
    assert admitted(pool, 9) == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "b4", "b5"]


def test_one_selection_comes_to_the_same_as_one_request_at_a_time() -> None:
    pools = [RequestPool(max_requests=100, order=fair()) for _ in range(2)]
    for pool in pools:
        for number in range(40):
            client = "abc"[number % 3]
            name = f"{client}{number}"
            pool.add(request_of(name, client, n_prompt=1 + number % 7, priority=number % 2))
    at_once = [request.request_id for request in pools[0].selectable()]
    assert at_once == admitted(pools[1], 40)


def test_a_client_has_a_share_by_its_weight() -> None:
    pool = RequestPool(max_requests=1000, order=fair())
    for number in range(90):
        pool.add(request_of(f"a{number}", "a", n_prompt=4))
        pool.add(request_of(f"b{number}", "b", n_prompt=4, weight=2))
    first = admitted(pool, 90)
    assert sum(name.startswith("b") for name in first) == 60


def test_nobody_saves_up_while_he_asks_for_nothing() -> None:
    pool = RequestPool(max_requests=100, order=fair())
    pool.add(request_of("b", "b", n_prompt=1))
    for number in range(20):
        pool.add(request_of(f"a{number}", "a", n_prompt=10))
    admitted(pool, 11)  # b's, and ten of a's
    for number in range(10):
        pool.add(request_of(f"b{number}", "b", n_prompt=10))
    assert admitted(pool, 6) == ["b0", "a10", "b1", "a11", "b2", "a12"]


def test_who_comes_when_nobody_waits_is_lifted_to_who_waited_last() -> None:
    pool = RequestPool(max_requests=100, order=fair())
    for number in range(10):
        pool.add(request_of(f"a{number}", "a", n_prompt=10))
    admitted(pool, 10)
    pool.add(request_of("b0", "b", n_prompt=10))
    pool.add(request_of("b1", "b", n_prompt=10))
    pool.add(request_of("a", "a", n_prompt=10))
    assert admitted(pool, 3) == ["b0", "a", "b1"]


def test_an_output_is_charged_as_it_comes() -> None:
    scheduler = build(max_batch_size=2, n_blocks=4, block_size=8, pipeline_depth=1, order=fair())
    driver = Driver(
        scheduler,
        [
            Arrival(0, n_prompt=2, max_new_tokens=6, n_iterations=6, client="a"),
            Arrival(0, n_prompt=1, max_new_tokens=1, n_iterations=1, client="b"),
            Arrival(0, n_prompt=2, max_new_tokens=1, n_iterations=1, client="a"),
            Arrival(0, n_prompt=2, max_new_tokens=1, n_iterations=1, client="b"),
            Arrival(0, n_prompt=2, max_new_tokens=1, n_iterations=1, client="b"),
        ],
    )
    driver.arrive()
    admissions = []
    while not driver.is_done:
        batch = driver.select()
        assert batch is not None
        admissions += [int(s.request.request_id) for s in batch.spans if s.is_admission]
        driver.return_oldest()
    assert admissions == [0, 1, 3, 2, 4]


def test_a_client_who_would_be_lifted_is_forgotten() -> None:
    order = fair()
    pool = RequestPool(max_requests=10_000, order=order)
    for number in range(20 * N_KEPT):
        pool.add(request_of(str(number), f"a{number}"))
        admitted(pool, 1)
    assert len(order._clients) <= 2 * N_KEPT


# What is cached


def test_the_one_of_which_most_is_cached_comes_first_of_a_clients() -> None:
    order = fair()
    pool = RequestPool(max_requests=100, order=order)
    for number in range(4):
        pool.add(request_of(f"a{number}", "a"))
        pool.add(request_of(f"b{number}", "b"))
    cached = {"a2": 5, "a3": 5, "b1": 9}
    names = []
    for _ in range(8):
        order.end_preference()
        order.prefer(lambda request: cached.get(request.request_id, 0))
        names += admitted(pool, 1)
    assert names == ["a2", "b1", "a3", "b0", "a0", "b2", "a1", "b3"]


@given(data=st.data(), n_requests=st.integers(1, 40))
def test_nobody_is_passed_over_without_end_for_what_is_cached(
    data: st.DataObject, n_requests: int
) -> None:
    order = fair()
    pool = RequestPool(max_requests=1000, order=order)
    waiting: list[str] = []
    passed: dict[str, int] = {}
    for number in range(n_requests):
        for _ in range(data.draw(st.integers(0, 12))):
            name = str(number * 100 + len(waiting))
            waiting.append(name)
            pool.add(request_of(name, "a"))
        if not waiting:
            continue
        order.end_preference()
        order.prefer(lambda _: data.draw(st.integers(0, 2)))
        if data.draw(st.integers(0, 9)) == 0:
            gone = data.draw(st.sampled_from(waiting))
            pool.remove(next(one for one in order if one.request_id == gone))
        else:
            (gone,) = admitted(pool, 1)
            assert waiting.index(gone) < N_PREFERABLE
            passed[waiting[0]] = passed.get(waiting[0], 0) + (gone != waiting[0])
        waiting.remove(gone)
    assert all(n <= MAX_PASSES for n in passed.values())


def test_what_is_passed_over_most_often_comes_though_others_are_cached() -> None:
    order = fair()
    pool = RequestPool(max_requests=100, order=order)
    for number in range(30):
        pool.add(request_of(str(number), "a"))
    places = []
    for _ in range(20):
        order.end_preference()
        order.prefer(lambda request: int(int(request.request_id) > 0))
        places += admitted(pool, 1)
    assert places.index("0") == MAX_PASSES


def test_each_pipeline_prefers_what_it_has_cached_and_leaves_others_what_they_prefer() -> None:
    order = fair()
    pool = RequestPool(max_requests=100, order=order)
    for number in range(6):
        pool.add(request_of(str(number), "a"))
    cached = ({"4": 9, "2": 5}, {"4": 7, "3": 5})  # by pipeline
    names = []
    for pipeline in (0, 1, 0, 1):
        order.end_preference()
        n_cached = cached[pipeline]
        order.prefer(
            lambda request, n_cached=n_cached: n_cached.get(request.request_id, 0),  # type: ignore[misc]
            pipeline=pipeline,
            n_pipelines=2,
        )
        names += admitted(pool, 1)
    assert names == ["4", "3", "2", "0"]
    order.end_preference()
    assert admitted(pool, 2) == ["1", "5"]


def test_a_preference_of_one_pipeline_does_not_hold_for_another() -> None:
    order = fair()
    pool = RequestPool(max_requests=100, order=order)
    for number in range(3):
        pool.add(request_of(str(number), "a"))
    order.prefer(lambda request: int(request.request_id), pipeline=0, n_pipelines=2)
    order.end_preference()
    order.prefer(lambda _: 0, pipeline=1, n_pipelines=2)
    assert admitted(pool, 1) == ["0"]
    order.end_preference()
    order.prefer(lambda _: 0, pipeline=0, n_pipelines=2)
    assert admitted(pool, 1) == ["2"]


# Priorities


def test_a_lower_number_comes_earlier_whoever_asks() -> None:
    pool = RequestPool(max_requests=100, order=fair())
    pool.add(request_of("late", "a", priority=3))
    pool.add(request_of("normal", "a"))
    pool.add(request_of("early", "b", n_prompt=1000, priority=-2))
    pool.add(request_of("early too", "b", priority=-2))
    assert admitted(pool, 4) == ["early", "early too", "normal", "late"]


def test_first_come_first_served_knows_no_priority() -> None:
    pool = RequestPool(max_requests=100)
    for number in range(3):
        pool.add(request_of(str(number), priority=-number))
    assert admitted(pool, 3) == ["0", "1", "2"]


def test_a_class_that_admits_nobody_rises() -> None:
    clock = Clock()
    pool = RequestPool(max_requests=1000, order=fair(clock))
    for number in range(3):
        pool.add(request_of(f"late {number}", priority=2))
    late_s = []
    for second in range(0, 200, 10):
        clock.now = second
        pool.add(request_of(f"normal {second}"))
        (name,) = admitted(pool, 1)
        if name.startswith("late"):
            late_s.append(second)
    assert late_s == [60, 120, 180]


@given(
    classes=st.lists(st.integers(-10, 10), min_size=2, max_size=5, unique=True),
    n_iterations=st.integers(1, 6),
    iteration_s=st.sampled_from([0.5, 7.0, 45.0]),
    data=st.data(),
)
def test_nobody_starves_whatever_the_others_send(
    classes: list[int], n_iterations: int, iteration_s: float, data: st.DataObject
) -> None:
    """One request runs at a time; all classes but one are never without a request."""
    clock = Clock()
    scheduler = build(
        max_batch_size=1, n_blocks=1, block_size=8, pipeline_depth=1, order=fair(clock)
    )
    starved = data.draw(st.sampled_from(classes))
    victim = request_of("victim", "v", n_new=n_iterations, priority=starved)
    scheduler.submit(victim)
    service_s = n_iterations * iteration_s
    rise_s = (starved - min(classes)) * AGEING_S
    number = 0
    while victim.state is RequestState.INITIATION:
        # The last admission before it began when it had risen, or each other class had one after.
        assert clock.now <= rise_s + (len(classes) + 1) * service_s
        waiting = {r.priority for r in scheduler.pool if r.state is RequestState.INITIATION}
        for priority in set(classes) - waiting:
            scheduler.submit(
                request_of(str(number), f"c{number}", n_new=n_iterations, priority=priority)
            )
            number += 1
        batch = scheduler.select()
        assert batch is not None
        clock.now += iteration_s
        scheduler.apply(batch.iteration, [1] * len(batch.spans))


def test_the_youngest_of_the_lowest_priority_is_preempted_first() -> None:
    pool = RequestPool(max_requests=100, order=fair())
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        request = request_of(name, priority=priority)
        pool.add(request)
        pool.mark_running([request], can_run=lambda _: False)
    assert max(pool.running, key=pool.order.rank).request_id == "c"
    assert max(pool.running, key=FirstComeFirstServed().rank).request_id == "d"


# Requests that have run


@pytest.mark.parametrize("policy", POLICIES)
@given(
    requests=arrivals(
        with_cancellations=True, clients=("", "a", "b2"), priorities=(-1, 0, 4), n_requests=40
    ),
    data=st.data(),
    depth=st.integers(1, 3),
)
def test_invariants_hold_over_losses_whatever_arrives_and_is_cancelled(
    policy: str, requests: list[Arrival], data: st.DataObject, depth: int
) -> None:
    order = fair()
    driver = Driver(scheduler_with(order, policy=policy, pipeline_depth=depth), requests)
    n_losses = 0
    while not driver.is_done:
        driver.arrive()
        batch = driver.select()
        check_memory(driver)
        check_batches(driver, max_batch_size=4)
        check_waiting(driver.scheduler.pool)
        if driver.in_flight and (batch is None or data.draw(st.booleans())):
            driver.return_oldest()
        elif n_losses < 2 and data.draw(st.booleans()):
            n_losses += 1
            driver.in_flight.clear()
            pool = driver.scheduler.pool
            _, ends = driver.scheduler.suspend()
            driver.updates += ends
            driver.scheduler = scheduler_with(order, policy=policy, pipeline_depth=depth)
            driver.scheduler.pool = pool
    check_ends(driver)
    assert not list(order)
    assert all(client.n_requests == client.n_waiting == 0 for client in order._clients.values())


def check_waiting(pool: RequestPool) -> None:
    """Checks that the pool knows how many wait, and by their priorities."""
    waiting = [r.priority for r in pool if r.state is RequestState.INITIATION]
    assert pool.n_waiting == len(waiting)
    assert pool.waiting.n_of("raised") == sum(priority < 0 for priority in waiting)
    assert pool.waiting.n_of("normal") == waiting.count(0)
    assert pool.waiting.n_of("lowered") == sum(priority > 0 for priority in waiting)


def test_who_was_preempted_goes_on_before_those_that_wait_and_is_charged_once() -> None:
    pool = RequestPool(max_requests=100, order=fair())
    begun = [request_of(f"a{number}", "a", n_prompt=50) for number in range(2)]
    for request in begun:
        pool.add(request)
    pool.add(request_of("b", "b"))
    pool.mark_running(begun, can_run=lambda _: False)
    client = begun[0].client
    assert client is not None
    served = client.served
    assert pool.preempt_all() == begun
    assert admitted(pool, 3) == ["a0", "a1", "b"]
    assert client.served == served
