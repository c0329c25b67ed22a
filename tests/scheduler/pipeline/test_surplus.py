"""Which spare gives up its stage: by examples, for any workers, and on real sockets."""

import asyncio
from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import rpc
from services.common.protocol import PROTOCOL
from services.scheduler.cluster.term import Unopposed
from services.scheduler.pipeline.fit import traits_of
from services.scheduler.pipeline.membership import RollCall
from services.scheduler.pipeline.muster import Offer, Presence
from services.scheduler.pipeline.surplus import SurplusWatch, to_recall
from tests.fakes import fake_stages, fake_worker
from tests.scheduler.pipeline.test_membership import LIMIT_S, Workers, form, workers
from tests.scheduler.pipeline.test_muster import FREE, LOADING, READY, Worker
from tests.scheduler.pipeline.test_muster import worker as any_worker

SERVING = {traits_of(Worker().answer)}
N_STAGES = 2


def recalled(*spares: Worker, n_stages: int = N_STAGES, taken: Collection[str] = ()) -> int | None:
    """Returns the index of the spare that gives up its stage. The name of a worker's process is the
    worker's index."""
    offers = [Offer(str(index), it.answer, it.presence) for index, it in enumerate(spares)]
    for offer in offers:
        offer.answer.process = offer.address
    found = to_recall(offers, n_stages, serving=SERVING, taken=taken)
    return None if found is None else int(found.address)


def test_the_only_spare_gives_up_its_stage() -> None:
    assert recalled(Worker(stage=1)) == 0


def test_a_spare_for_the_only_stage_keeps_it() -> None:
    assert recalled(Worker(n_stages=1), n_stages=1) is None


@pytest.mark.parametrize(
    "beside",
    [
        Worker(FREE),
        Worker(stage=0),
        Worker(LOADING),
        Worker(presence=Presence.SILENT),
        Worker(presence=Presence.ENDED),
        Worker(FREE, kind=""),
    ],
    ids=["free", "holds the other stage", "loads", "silent", "starts again", "its ranks start"],
)
def test_a_spare_keeps_its_stage_if_another_one_is_or_may_be_there_for_the_others(
    beside: Worker,
) -> None:
    assert recalled(Worker(stage=1), beside) is None


def test_the_spare_that_is_missed_least_gives_up_its_stage() -> None:
    third = Worker(stage=2, n_stages=3)
    assert recalled(third, replace(third, stage=1), third, n_stages=3) in (0, 2)
    assert recalled(Worker(), Worker(), third) == 2, "there is no such stage"


@pytest.mark.parametrize(
    "spare",
    [Worker(is_fixed=True), Worker(kind="b"), Worker(protocol=PROTOCOL - 1)],
    ids=["fixed", "another build", "another protocol"],
)
def test_a_worker_that_cannot_be_a_spare_for_all_stages_keeps_its_own(spare: Worker) -> None:
    assert recalled(spare) is None


def test_a_member_that_is_known_by_another_address_too_keeps_its_stage() -> None:
    assert recalled(Worker(stage=1), taken=["0"]) is None
    assert recalled(Worker(stage=1), Worker(stage=0), Worker(stage=0), taken=["0", "1"]) == 2


def test_a_spare_gives_up_its_stage_once_it_has_been_surplus_for_a_while() -> None:
    now = 0.0
    watch = SurplusWatch(lambda: now, settle_s=5)
    one, other = (Offer(address, Worker(stage=1).answer) for address in "ab")
    told = []
    for second, offer in enumerate([one] * 5 + [None] + [one] * 6 + [other] * 6):
        now = float(second)
        told.append(watch.settled(offer))
    assert told == [None] * 11 + [one] + [None] * 5 + [other]
    watch.begin_anew()
    assert watch.settled(other) is None


@given(st.lists(any_worker(), max_size=6))
def test_after_a_few_recalls_the_spares_can_take_over_all_stages(spares: list[Worker]) -> None:
    spares = [replace(it, presence=Presence.HERE) for it in spares]
    n_recalled = 0
    while (index := recalled(*spares)) is not None:
        n_recalled += 1
        assert spares[index].state == READY
        spares[index] = replace(spares[index], state=FREE)
    assert n_recalled <= 1, "a worker without a stage is enough"
    usable = [
        it
        for it in spares
        if it.kind == "a"
        and it.protocol == PROTOCOL
        and (not it.is_fixed or it.n_stages == N_STAGES)
    ]
    held = {it.stage for it in usable if it.n_stages == N_STAGES and it.state == READY}
    is_settled = all(it.state == READY for it in usable)
    assert not is_settled or len(held) == N_STAGES or all(it.is_fixed for it in usable)


async def test_a_spare_with_a_stage_is_recalled_and_a_member_is_not() -> None:
    async with fake_stages(2) as members, fake_worker() as spare:
        term = Unopposed()
        pipeline = await form(workers(2, members[0], spare), term)
        assert spare.controller.assignment.place is not None
        beside = workers(2, spare)
        call = RollCall(
            beside, term, rpc.connect, serving=lambda: {traits_of(pipeline.first)}, settle_s=0
        )
        async with asyncio.timeout(LIMIT_S):
            while not spare.controller.assignment.is_recalled.is_set():
                await call.recall_surplus()
                await asyncio.sleep(0.01)
        assert not any(it.controller.assignment.is_recalled.is_set() for it in members)
        await call.close()


async def test_a_member_is_not_recalled_by_its_second_address() -> None:
    async with fake_worker() as member, fake_worker() as peer, fake_worker() as spare:
        term = Unopposed()
        pipeline = await form(workers(2, member, peer), term)
        await form(workers(2, peer, spare), term)  # so the spare holds the member's stage
        second = member.address.replace("127.0.0.1", "localhost")
        beside, offered = Workers(2, [second]), set[str]()

        def is_serving(address: str) -> bool:
            offered.add(address)
            return False

        call = RollCall(
            beside,
            term,
            rpc.connect,
            serving=lambda: {traits_of(pipeline.first)},
            is_serving=is_serving,
            taken=lambda: pipeline.processes,
            settle_s=0,
        )
        async with asyncio.timeout(LIMIT_S):
            while second not in offered:
                await call.recall_surplus()
                await asyncio.sleep(0.01)
            beside.known.append(spare.address)
            while not spare.controller.assignment.is_recalled.is_set():
                await call.recall_surplus()
                await asyncio.sleep(0.01)
        assert not member.controller.assignment.is_recalled.is_set()
        await call.close()
