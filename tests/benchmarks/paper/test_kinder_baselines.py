"""Request-level schedules that are kinder than FasterTransformer, worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper.faster_transformer import FasterTransformer, Kinder, Prompts
from simulator.costs import LinearCosts
from simulator.engine import Arrival, Simulation
from simulator.outcome import Outcome
from simulator.virtual_clock import VirtualClock

PER_ITERATION = (1.0,) + (0.0,) * 9
PER_TOKEN = (0.0,) + (1.0,) * 6 + (0.0,) * 3
PER_SLOT = (0.0,) * 8 + (1.0, 0.0)

THREE = [Arrival(0.0, 2, 1), Arrival(0.0, 4, 3), Arrival(0.0, 3, 2)]


def served(
    arrivals: list[Arrival],
    kinder: Kinder,
    costs: tuple[float, ...] = PER_ITERATION,
    *,
    size: int = 8,
    microbatch_size: int | None = None,
    n_stages: int = 1,
    n_slots: int = 100_000,
) -> Outcome:
    clock = VirtualClock()
    system = FasterTransformer(
        n_slots=n_slots,
        max_batch_size=size,
        microbatch_size=microbatch_size or size,
        kinder=kinder,
        clock=clock,
    )
    outcome = Simulation(system, LinearCosts((costs,) * n_stages), arrivals, clock=clock).run()
    assert system.n_reserved_slots == 0
    return outcome


def ends_s(outcome: Outcome) -> list[float]:
    """The times at which requests end, by their outputs."""
    return [one.end_s for one in sorted(outcome.requests, key=lambda one: one.n_output)]


def test_continuous_delivery_changes_when_answers_come_and_nothing_else() -> None:
    late, early = (served(THREE, Kinder(is_continuous=is_early)) for is_early in (False, True))
    # The longest has 4 + 3 tokens, of which 2 come in the first iteration.
    assert late.n_iterations == early.n_iterations == 7 - 2
    assert ends_s(late) == [5.0, 5.0, 5.0]
    assert ends_s(early) == [1.0, 3.0, 5.0]


def test_padded_prompts_take_one_iteration_of_the_longest() -> None:
    kinder = Kinder(Prompts.PADDED, is_continuous=True)
    assert ends_s(served(THREE, kinder)) == [1.0, 2.0, 3.0]
    assert served(THREE, kinder, PER_TOKEN).duration_s == 3 * 4 + 3 + 3


def test_padding_is_read_by_later_iterations() -> None:
    two = [Arrival(0.0, 1, 2), Arrival(0.0, 5, 2)]
    # A decode reads the slots before its token and its own: five of a prompt, and one.
    assert served(two, Kinder(Prompts.PADDED), PER_SLOT).duration_s == 6 + 6
    # Unpadded, the short prompt is a span of one token too, and its decode reads two slots.
    assert served(two, Kinder(Prompts.OWN), PER_SLOT).duration_s == 1 + 2 + 6


def test_without_padding_each_prompt_has_its_own_tokens() -> None:
    outcome = served(THREE, Kinder(Prompts.OWN, is_continuous=True), PER_TOKEN)
    assert outcome.duration_s == (2 + 4 + 3) + 3 + 3
    assert ends_s(outcome) == [9.0, 12.0, 15.0]


def test_who_has_ended_may_leave() -> None:
    outcome = served(THREE, Kinder(Prompts.OWN, leaves=True), PER_TOKEN)
    assert outcome.duration_s == (2 + 4 + 3) + 2 + 1


def test_a_batch_ends_with_the_last_that_leaves() -> None:
    early = [Arrival(0.0, 2, 3, max_new_tokens=9)]
    assert served(early, Kinder()).duration_s == 9  # it asks for so many
    assert served(early, Kinder(leaves=True)).duration_s == 3


def test_memory_as_needed_lets_more_in() -> None:
    kinder = Kinder(Prompts.OWN, allocates_own=True)
    assert ends_s(served(THREE, kinder, n_slots=15)) == [3.0, 3.0, 3.0]
    # The first two need 10 slots, the third must wait for the next batch.
    assert ends_s(served(THREE, kinder, n_slots=14)) == [3.0, 5.0, 3.0]


def test_two_batches_fill_a_pipeline_without_microbatches() -> None:
    arrivals = [Arrival(0.0, 1, 10)] * 2
    one, two = (
        served(arrivals, Kinder(n_batches=n), size=1, n_stages=2).duration_s for n in (1, 2)
    )
    assert (one, two) == (2 * 20.0, 21.0)


def test_a_delay_waits_for_a_fuller_batch_and_no_longer() -> None:
    kinder = Kinder(Prompts.OWN, max_delay_s=2.0)
    alone = [Arrival(1.0, 1, 3)]
    assert ends_s(served(alone, kinder)) == [1.0 + 2.0 + 3.0]
    together = [Arrival(1.0, 1, 3), Arrival(2.5, 1, 4)]
    assert ends_s(served(together, kinder)) == [3.0 + 4.0, 3.0 + 4.0]
    assert ends_s(served(together, kinder, size=2)) == [2.5 + 4.0, 2.5 + 4.0]  # it is full
    assert ends_s(served(together, replace(kinder, max_delay_s=1.0))) == [5.0, 5.0 + 4.0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="16 requests of 2048 slots do not fit into 30000"):
        FasterTransformer(
            n_slots=30_000, max_batch_size=8, microbatch_size=8, kinder=Kinder(n_batches=2)
        )
    with pytest.raises(ValueError, match="max_delay_s needs a clock"):
        FasterTransformer(
            n_slots=30_000, max_batch_size=8, microbatch_size=8, kinder=Kinder(max_delay_s=1.0)
        )


@given(
    st.lists(
        st.builds(
            Arrival,
            st.floats(0.0, 30.0),
            n_prompt := st.integers(1, 9),
            n_prompt,
            max_new_tokens=st.none() | st.just(12),
        ),
        min_size=1,
        max_size=9,
    ),
    st.builds(
        Kinder,
        st.sampled_from(Prompts),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.integers(1, 3),
        st.sampled_from((0.0, 1.5)),
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_nobody_is_lost_whatever_is_kinder(
    arrivals: list[Arrival], kinder: Kinder, size: int, microbatch_size: int
) -> None:
    outcome = served(
        arrivals, kinder, size=size, microbatch_size=microbatch_size, n_stages=2, n_slots=30_000
    )
    assert sorted((one.arrival_s, one.n_output) for one in outcome.requests) == sorted(
        (one.time_s, one.n_output) for one in arrivals
    )
    assert outcome.n_output == sum(one.n_output for one in arrivals)
    assert all(one.first_token_s <= one.end_s for one in outcome.requests)
