import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.epochs import EPOCHS_PER_TERM, MAX_EPOCH, MAX_REACHED_EPOCH
from services.scheduler.cluster.term import ElectedTerm, Term, Unopposed


class Election:
    """Moves the leader on, as long as it is the leader."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_over = False

    async def advance(self, beyond: int) -> int:
        if self.is_over:
            raise ConnectionAbortedError("another leads")
        self.number = beyond + 1
        return self.number


async def test_without_opponents_epochs_are_counted() -> None:
    term = Unopposed()
    assert [await term.next_epoch(seen) for seen in (0, 1, 7)] == [1, 2, 8]


@pytest.mark.parametrize("term", [Unopposed(), ElectedTerm(3, Election(3))], ids=["one", "elected"])
async def test_no_epoch_comes_twice_when_all_stages_have_forgotten(term: Term) -> None:
    first = await term.next_epoch(0)
    assert await term.next_epoch(0) == first + 1


@given(term=st.integers(1, 2**20), later=st.integers(1, 50), n_epochs=st.integers(1, 20))
async def test_every_epoch_of_a_later_term_is_newer(term: int, later: int, n_epochs: int) -> None:
    old = ElectedTerm(term, Election(term))
    seen = 0
    for _ in range(n_epochs):
        newer = await old.next_epoch(seen)
        assert newer > seen
        seen = newer
    assert await ElectedTerm(term + later, Election(term + later)).next_epoch(seen) > seen


async def test_a_term_counts_its_own_epochs() -> None:
    term = ElectedTerm(3, Election(3))
    first = await term.next_epoch(0)
    assert first == 3 * EPOCHS_PER_TERM + 1
    assert await term.next_epoch(first) == first + 1


async def test_a_leader_that_stages_have_outlived_moves_on_to_a_later_term() -> None:
    election = Election(1)  # the lease was made anew, and counts from 1
    epoch = await ElectedTerm(1, election).next_epoch(9 * EPOCHS_PER_TERM + 5)
    assert election.number == 10
    assert epoch == 10 * EPOCHS_PER_TERM + 1


async def test_a_deposed_leader_gets_no_epoch() -> None:
    election = Election(3)
    election.is_over = True
    with pytest.raises(ConnectionAbortedError):
        await ElectedTerm(3, election).next_epoch(4 * EPOCHS_PER_TERM + 1)


async def test_two_leaders_of_the_same_term_do_not_take_turns() -> None:
    old, new = Election(1), Election(1)  # as after the lease was deleted
    first = await ElectedTerm(1, old).next_epoch(0)
    second = await ElectedTerm(1, new).next_epoch(first)
    assert (new.number, second) == (2, 2 * EPOCHS_PER_TERM + 1)
    old.is_over = True
    with pytest.raises(ConnectionAbortedError):
        await ElectedTerm(1, old).next_epoch(second)


async def test_a_term_whose_epochs_are_used_up_becomes_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.scheduler.cluster.term.EPOCHS_PER_TERM", 4)
    election = Election(2)
    term = ElectedTerm(2, election)
    seen = 0
    for expected in (9, 10, 11, 13, 14, 15, 17):
        seen = await term.next_epoch(seen)
        assert seen == expected
    assert election.number == 4


MAX_TRANSITIONS = 2**31 - 1  # of a Lease: an int32


def test_the_last_epoch_is_that_of_the_last_term_that_a_lease_can_count() -> None:
    assert MAX_EPOCH == (MAX_TRANSITIONS + 1) * EPOCHS_PER_TERM - 1


@pytest.mark.parametrize("seen", [MAX_REACHED_EPOCH, MAX_REACHED_EPOCH + 1, MAX_EPOCH, 2**64 - 1])
async def test_no_epoch_that_a_stage_says_it_has_seen_uses_up_the_terms(seen: int) -> None:
    election = Election(3)
    epoch = await ElectedTerm(3, election).next_epoch(seen)
    assert election.number <= MAX_TRANSITIONS // 2 + 1
    assert (epoch > seen) == (seen <= MAX_REACHED_EPOCH)
    assert epoch > 4 * EPOCHS_PER_TERM


async def test_a_deposed_leader_gets_no_epoch_from_one_that_nobody_can_have_reached() -> None:
    election = Election(3)
    election.is_over = True
    with pytest.raises(ConnectionAbortedError):
        await ElectedTerm(3, election).next_epoch(MAX_EPOCH)


async def test_without_opponents_an_epoch_that_nobody_can_have_reached_is_passed_over() -> None:
    term = Unopposed()
    assert [await term.next_epoch(seen) for seen in (5, MAX_EPOCH, 2**64 - 1)] == [6, 7, 8]
