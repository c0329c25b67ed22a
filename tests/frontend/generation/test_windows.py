"""One call has a few answers at the scheduler at a time, and nobody waits for who does not read."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.api_keys import Account, ApiKey, hash_of
from services.frontend.generation.admission import Admission
from services.frontend.generation.generation_service import GenerationService
from services.frontend.request.generation_request import GenerationOptions, GenerationRequest
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals
from services.frontend.text.tokenizer import Tokenizer
from tests.fake_scheduler import FakeRequest, FakeScheduler, keeps_quiet, rejects, says
from tests.frontend import checkpoints
from tests.frontend.conftest import connected, soon
from tests.limits import HANG_S

TOKENIZER = Tokenizer(checkpoints.byte_level())
A, B = TOKENIZER.to_tokens("ab", add_special_tokens=False)


@dataclass
class Desk:
    """A generation service in front of a scheduler that does what a test says."""

    service: GenerationService
    admission: Admission
    scheduler: FakeScheduler
    budget: MemoryBudget
    refusals: Refusals

    async def until(self, n_in_flight: int) -> None:
        async with asyncio.timeout(HANG_S):
            while self.admission.n_in_flight != n_in_flight:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def desk(
    scheduler: FakeScheduler, *, resume_s: float = 0.0, **settings: Any
) -> AsyncIterator[Desk]:
    refusals = Refusals()
    budget = MemoryBudget(2**26, refusals=refusals)
    async with connected(scheduler, resume_s=resume_s) as client:
        admission = Admission(budget=budget, refusals=refusals, **settings)
        service = GenerationService(TOKENIZER, client, admission=admission)
        yield Desk(service, admission, scheduler, budget, refusals)


def account(max_in_flight: int = 100) -> Account:
    return Account(ApiKey(name="alice", sha256=hash_of("a"), max_in_flight=max_in_flight))


def answers(n: int, n_prompts: int = 1, **options: Any) -> GenerationRequest:
    return GenerationRequest(
        prompts=("hello",) * n_prompts, options=GenerationOptions(n=n, max_tokens=4, **options)
    )


class Turns:
    """A behaviour that ends each request when it is told to, and notes how many run."""

    def __init__(self) -> None:
        self.n_running = 0
        self.most = 0
        self.may_end = asyncio.Semaphore(0)

    async def __call__(self, request: FakeRequest) -> None:
        self.n_running += 1
        self.most = max(self.most, self.n_running)
        request.accept()
        await self.may_end.acquire()
        self.n_running -= 1
        request.last_token(A, scheduler_pb2.COMPLETION_REASON_LENGTH)


async def test_a_few_answers_are_at_the_scheduler_at_a_time_and_all_are_answered() -> None:
    turns = Turns()
    async with desk(FakeScheduler(turns), max_answers_at_once=3) as at:
        async with at.service.open(answers(5, n_prompts=2), account()) as generation:
            completing = asyncio.ensure_future(generation.complete())
            assert len(at.scheduler.requests) == 3
            for n_ended in range(1, 11):
                turns.may_end.release()
                await at.until(min(3, 10 - n_ended))
                await soon(at.scheduler.wait_requests(min(10, 3 + n_ended)))
            pieces = await soon(completing)
        assert turns.most == 3
        assert [(piece.index, piece.text) for piece in pieces] == [(i, "a") for i in range(10)]
        seeds = [request.submission.sampling.seed for request in at.scheduler.requests]
        assert [seed - seeds[0] for seed in seeds] == list(range(10))
        assert {r.submission.account.name for r in at.scheduler.requests} == {"alice"}
        assert at.budget.n_bytes == 0


async def test_a_call_that_is_over_is_gone_without_a_collector() -> None:
    async with desk(FakeScheduler(says(A))) as at:
        gc.disable()
        try:
            async with at.service.open(answers(3)) as generation:
                await soon(generation.complete())
            is_alive = weakref.ref(generation)
            del generation
            assert is_alive() is None
        finally:
            gc.enable()


async def test_stop_string_makes_room_for_the_next_answer() -> None:
    async def goes_on(request: FakeRequest) -> None:
        request.accept()
        request.tokens(A, B)

    async with (
        desk(FakeScheduler(goes_on), max_answers_at_once=1) as at,
        at.service.open(answers(3, stop=("b",))) as generation,
    ):
        assert [piece.text for piece in await soon(generation.complete())] == ["a"] * 3
        assert at.admission.n_in_flight == 0
        assert len(at.scheduler.requests) == 3


async def test_answer_that_meets_a_full_pool_later_has_its_turn() -> None:
    scheduler = FakeScheduler()

    async def full_at_first(request: FakeRequest) -> None:
        if len(scheduler.requests) == 2:
            reason = scheduler_pb2.REJECTION_REASON_POOL_FULL
            await rejects(reason, retry_after_s=0.01)(request)
        else:
            await says(A)(request)

    scheduler.behaviour = full_at_first
    async with (
        desk(scheduler, resume_s=HANG_S, max_answers_at_once=1) as at,
        at.service.open(answers(3)) as generation,
    ):
        assert len(await soon(generation.complete())) == 3
        assert len(at.scheduler.requests) == 4


@pytest.mark.parametrize("n_accepted", [0, 2])
async def test_refusal_of_a_first_answer_is_raised_before_the_stream(n_accepted: int) -> None:
    scheduler = FakeScheduler()

    async def refuses(request: FakeRequest) -> None:
        if len(scheduler.requests) > n_accepted:
            await rejects(scheduler_pb2.REJECTION_REASON_POOL_FULL)(request)
        else:
            await keeps_quiet(request)

    scheduler.behaviour = refuses
    async with desk(scheduler, max_answers_at_once=4) as at:
        with pytest.raises(errors.PoolFull):
            async with at.service.open(answers(8)):
                pass
        assert len(at.scheduler.requests) <= 4
        assert at.admission.n_in_flight == 0


async def test_failure_of_a_later_answer_ends_the_call_and_submits_no_more() -> None:
    scheduler = FakeScheduler()

    async def fails_later(request: FakeRequest) -> None:
        if len(scheduler.requests) > 2:
            request.accept()
            request.complete(scheduler_pb2.COMPLETION_REASON_FAILED)
        else:
            await says(A)(request)

    scheduler.behaviour = fails_later
    async with desk(scheduler, max_answers_at_once=1) as at:
        with pytest.raises(errors.RequestFailed):
            async with at.service.open(answers(9)) as generation:
                await soon(generation.complete())
        assert len(at.scheduler.requests) == 3
        assert at.admission.n_in_flight == 0


async def test_answers_that_nobody_reads_count_until_the_scheduler_is_done() -> None:
    caller = account(max_in_flight=4)
    async with desk(FakeScheduler(says(A, B)), max_answers_at_once=2, max_in_flight=4) as at:
        async with at.service.open(answers(4), caller) as unread:
            await at.until(0)
            async with at.service.open(answers(4), caller) as generation:
                assert len(await soon(generation.complete())) == 4
            leaving = asyncio.ensure_future(at.admission.wait_idle())
            await asyncio.sleep(0)
            assert not leaving.done()
            assert [piece.text for piece in await soon(unread.complete())] == ["ab"] * 4
            assert not leaving.done()
        await soon(leaving)
        assert at.budget.n_bytes == 0


async def test_too_much_unread_cancels_the_call() -> None:
    async def floods(request: FakeRequest) -> None:
        request.accept()
        while True:
            request.tokens(*(A,) * 1000)
            await asyncio.sleep(0)

    async with desk(FakeScheduler(floods)) as at:
        async with at.service.open(answers(2)) as generation:
            await at.until(0)
            with pytest.raises(errors.PoolFull, match="not read"):
                await soon(generation.complete())
        await soon(at.scheduler.wait_ended())
        assert at.refusals[Refusal.UNREAD] == 1
        assert at.budget.n_bytes == 0


async def test_more_answers_than_can_ever_be_in_flight_are_a_mistake() -> None:
    async with desk(FakeScheduler(), max_in_flight=4) as at:
        for request, field in ((answers(5), "n"), (answers(1, n_prompts=5), "prompt")):
            with pytest.raises(errors.InvalidRequest) as caught:
                async with at.service.open(request):
                    pass
            assert caught.value.field == field
        assert at.refusals[Refusal.IN_FLIGHT] == 2


async def test_prompt_that_can_never_fit_is_a_mistake_however_much_memory_is_taken() -> None:
    async with desk(FakeScheduler()) as at:
        for prompt in ("x" * 300_000, "x" * 20_000, (5,) * 128):
            with at.budget.share(2**26), pytest.raises(errors.InvalidRequest):
                async with at.service.open(GenerationRequest(prompts=(prompt,))):
                    pass
        assert at.refusals[Refusal.PROMPT_TOO_LONG] == 3


async def test_making_tokens_counts_like_an_answer() -> None:
    caller = account(max_in_flight=1)
    async with desk(FakeScheduler(keeps_quiet), max_in_flight=2) as at:
        assert await at.service.tokens.tokenize("hello", caller)
        async with at.service.open(answers(1), caller):
            with pytest.raises(errors.PoolFull, match="API key"):
                await at.service.tokens.tokenize("hello", caller)
            async with at.service.open(answers(1)):
                with pytest.raises(errors.PoolFull):
                    await at.service.tokens.tokenize("hello")
        assert at.admission.n_in_flight == 0


async def test_client_that_leaves_takes_back_its_answers_and_those_that_wait() -> None:
    async with desk(FakeScheduler(keeps_quiet), max_answers_at_once=2) as at:
        async with at.service.open(answers(5)) as generation:
            assert at.admission.n_in_flight == 2
            generation.close()
            assert at.admission.n_in_flight == 0
        await soon(at.scheduler.wait_ended())
        assert len(at.scheduler.requests) == 2


async def test_a_large_call_leaves_places_to_others() -> None:
    """Its answers that wait for each other count when it is their turn."""
    async with (
        desk(FakeScheduler(keeps_quiet), max_answers_at_once=2, max_in_flight=10) as at,
        at.service.open(answers(9)),
        at.service.open(answers(9)),
        at.service.open(answers(6)) as last,
    ):
        assert at.admission.n_in_flight == 6
        last.close()
        assert at.admission.n_in_flight == 4
