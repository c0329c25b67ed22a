"""The rule by which an iteration counts as hung."""

from hypothesis import given
from hypothesis import strategies as st

from services.common.iteration_limit import FIRST_S, IterationLimit, IterationSize

FLOOR_S, CEILING_S = 6.0, 300.0

works = st.builds(
    lambda start, n: IterationSize.of([start], [n]),
    st.integers(0, 100_000),
    st.integers(1, 100_000),
)
histories = st.lists(st.tuples(works, st.floats(0, 1000)), max_size=20)


def limit_after(history: list[tuple[IterationSize, float]]) -> IterationLimit:
    limit = IterationLimit(floor_s=FLOOR_S, ceiling_s=CEILING_S)
    for work, elapsed_s in history:
        limit.learn(work, elapsed_s)
    return limit


@given(histories, works)
def test_a_limit_is_between_floor_and_ceiling(
    history: list[tuple[IterationSize, float]], work: IterationSize
) -> None:
    assert FLOOR_S <= limit_after(history).of(work) <= CEILING_S


@given(histories, works, st.integers(0, 10_000), st.integers(0, 10**8))
def test_a_larger_iteration_may_take_longer(
    history: list[tuple[IterationSize, float]],
    work: IterationSize,
    n_more: int,
    n_more_attended: int,
) -> None:
    limit = limit_after(history)
    larger = IterationSize(work.n_tokens + n_more, work.n_attended + n_more_attended)
    assert limit.of(larger) >= limit.of(work)


@given(histories, works, st.floats(0, 25))
def test_a_slow_machine_is_not_taken_for_a_hung_one(
    history: list[tuple[IterationSize, float]], work: IterationSize, elapsed_s: float
) -> None:
    limit = limit_after(history)
    limit.learn(work, elapsed_s)
    assert limit.of(work) >= FLOOR_S + 10 * elapsed_s


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 600)), min_size=1, max_size=20),
    st.tuples(st.integers(0, 100_000), st.integers(1, 100_000)),
    st.floats(0, 1),
    st.floats(0, 0.01),
    st.floats(0, 1e-6),
)
def test_what_costs_so_much_per_token_and_pair_is_always_within_the_limit(
    seen: list[tuple[int, int]],
    span: tuple[int, int],
    fixed_s: float,
    token_s: float,
    pair_s: float,
) -> None:
    limit = IterationLimit(floor_s=FLOOR_S, ceiling_s=float("inf"))

    def cost_s(work: IterationSize) -> float:
        return fixed_s + token_s * work.n_tokens + pair_s * work.n_attended

    for start, n_tokens in seen:
        work = IterationSize.of([start], [n_tokens])
        limit.learn(work, cost_s(work))
    work = IterationSize.of([span[0]], [span[1]])
    assert limit.of(work) > cost_s(work)


def test_a_hung_decode_is_noticed_within_seconds_and_a_long_prompt_has_its_time() -> None:
    limit = IterationLimit(floor_s=FLOOR_S, ceiling_s=3600)
    decode, prompt = IterationSize.of([500], [1]), IterationSize.of([0], [100_000])
    assert limit.of(decode) > FIRST_S
    for _ in range(100):
        limit.learn(decode, 0.02)
    assert limit.of(decode) < 7
    assert limit.of(prompt) == 3600
    limit.learn(prompt, 60)
    assert 600 < limit.of(prompt) < 3600
    assert limit.of(decode) < 7


def test_a_machine_that_was_slow_for_a_while_is_forgotten() -> None:
    limit = IterationLimit(floor_s=FLOOR_S, ceiling_s=CEILING_S)
    decode = IterationSize.of([500], [1])
    limit.learn(decode, 20)
    for _ in range(100):
        limit.learn(decode, 0.02)
    assert limit.of(decode) < 7


def test_the_size_of_an_iteration_is_that_of_its_spans() -> None:
    assert IterationSize.of([0, 100], [10, 1]) == IterationSize(11, 10 * 10 + 101)


def test_a_ceiling_below_the_floor_holds() -> None:
    limit = IterationLimit(floor_s=6, ceiling_s=1)
    assert limit.of(IterationSize(1, 1)) == 1
