"""The choice of a pipeline weighs what comes before a request and what it has to compute."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from services.scheduler.core.placement import COMPUTING_WEIGHT, RUNNING_TOKENS, Placement
from services.scheduler.core.request import Request, RequestId


@dataclass
class FakeRoom:
    """A pipeline with a load that a test sets."""

    n_running: int = 0
    n_prompt_tokens_left: int = 0
    n_uncached: int = 100
    n_places: int = 10
    n_woken: int = 0

    @property
    def build(self) -> str:
        return "build"

    def n_blocks_for(self, request: Request) -> int:
        return 1

    def fits_ever(self, request: Request) -> bool:
        return True

    def takes(self, request: Request, *, n_more_blocks: int = 0) -> bool:
        return True

    def n_uncached_tokens(self, request: Request) -> int:
        return self.n_uncached

    def wake(self) -> None:
        self.n_woken += 1


def requests(n: int) -> Iterator[Request]:
    return iter([Request(RequestId(str(number)), [1], 1) for number in range(n)])


def n_taken(placement: Placement, pipeline: int, n: int) -> int:
    """Returns how many of `n` waiting requests a pipeline takes."""
    return len(list(placement.passing(pipeline, requests(n))))


def placement_of(*rooms: FakeRoom) -> Placement:
    placement = Placement()
    for number, room in enumerate(rooms):
        placement.open(number, room)
    return placement


@pytest.mark.parametrize(("n_before", "is_left"), [(99, True), (101, False)])
def test_own_tokens_weigh_more_than_those_before(n_before: int, is_left: bool) -> None:
    caching = FakeRoom(
        1, n_prompt_tokens_left=COMPUTING_WEIGHT * 50 + n_before - 100, n_uncached=50
    )
    other = FakeRoom(1)
    placement = placement_of(other, caching)
    assert n_taken(placement, 0, 1) == 1 - is_left
    assert caching.n_woken == is_left


@pytest.mark.parametrize(("n_before", "is_left"), [(49, True), (51, False)])
def test_an_idle_pipeline_waits_for_no_later_first_token(n_before: int, is_left: bool) -> None:
    caching = FakeRoom(1, n_prompt_tokens_left=n_before - RUNNING_TOKENS, n_uncached=50)
    assert n_taken(placement_of(FakeRoom(), caching), 0, 1) == 1 - is_left


def test_requests_are_dealt_to_equal_pipelines() -> None:
    placement = placement_of(FakeRoom(), FakeRoom())
    assert n_taken(placement, 0, 10) == n_taken(placement, 1, 10) == 5


def test_a_full_pipeline_gets_nothing() -> None:
    placement = placement_of(FakeRoom(n_running=20), FakeRoom(n_places=2))
    assert n_taken(placement, 0, 10) == 8
