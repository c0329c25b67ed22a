"""Work for one client leaves room for the others."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.api_keys import Account, ApiKey, hash_of
from services.frontend.generation.admission import Admission
from services.frontend.generation.answer import Piece
from services.frontend.generation.encoded_prompt import EncodedPrompt
from services.frontend.generation.generation import Generation
from services.frontend.generation.generation_service import GenerationService
from services.frontend.generation.outlet import Outlet
from services.frontend.request.conversation import ChatMessage, Conversation
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.generation_request import GenerationOptions, GenerationRequest
from services.frontend.request.text_pair import TextPair
from services.frontend.text.text_threads import INLINE_CHARACTERS
from services.frontend.text.tokenizer import Tokenizer
from tests.fake_scheduler import FakeRequest, FakeScheduler
from tests.frontend import checkpoints
from tests.frontend.conftest import connected, soon

LONG = scheduler_pb2.PipelineDescription(
    model="test-model", vocab_size=512, max_model_len=1_000_000, eos_token_ids=[1]
)


class Watched(Tokenizer):
    """Notes how often another coroutine had its turn, before and after each text."""

    def __init__(self) -> None:
        super().__init__(checkpoints.byte_level())
        self.n_ticks = 0
        self.noted: list[tuple[int, int]] = []

    def to_tokens(self, text: str | TextPair, **options: Any) -> tuple[int, ...]:
        before = self.n_ticks
        token_ids = super().to_tokens(text, **options)
        self.noted.append((before, self.n_ticks))
        return token_ids

    async def tick(self) -> None:
        """The other coroutine."""
        while True:
            self.n_ticks += 1
            await asyncio.sleep(0)


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """No thread has to let others run: they do only while this one waits, or is out of Python."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(interval)


async def test_others_run_while_a_long_text_is_encoded(no_forced_switches: None) -> None:
    tokenizer = Watched()
    async with connected(FakeScheduler(pipeline=LONG)) as client:
        service = GenerationService(tokenizer, client)
        ticking = asyncio.ensure_future(tokenizer.tick())
        await soon(service.tokens.tokenize("hello world " * INLINE_CHARACTERS))
        ticking.cancel()
    ((before, after),) = tokenizer.noted
    assert after > before


async def test_others_run_between_the_prompts_of_a_request() -> None:
    tokenizer = Watched()
    request = GenerationRequest(prompts=("hello",) * 20, options=GenerationOptions(max_tokens=1))
    async with connected(FakeScheduler()) as client:
        ticking = asyncio.ensure_future(tokenizer.tick())
        async with GenerationService(tokenizer, client).open(request) as generation:
            await soon(generation.complete())
        ticking.cancel()
    turns = [before for before, _ in tokenizer.noted]
    assert len(set(turns)) == len(request.prompts)


def test_answer_continues_a_text_and_stands_alone_in_a_conversation() -> None:
    conversation = Conversation((ChatMessage("user", "x"),))
    assert EncodedPrompt(conversation, (5, 6), 1, ()).context == ()
    assert EncodedPrompt("x", (5, 6), 1, ()).context == (5, 6)
    assert EncodedPrompt((5, 6), (5, 6), 1, ()).context == (5, 6)


@pytest.mark.parametrize("n", [-1, 0])
async def test_a_wrong_number_of_answers_gives_no_room(n: int) -> None:
    account = Account(ApiKey(name="a", sha256=hash_of("a"), max_in_flight=1))
    wrong = GenerationRequest(prompts=("hello",), options=GenerationOptions(n=n))
    async with connected(FakeScheduler()) as client:
        service = GenerationService(Tokenizer(checkpoints.byte_level()), client)
        with pytest.raises(errors.InvalidRequest):
            async with service.open(wrong, account):
                pass
        with pytest.raises(errors.InvalidRequest):
            await service.tokens.tokenize("hello", account, options=wrong.options)
    with account.receiving(), pytest.raises(errors.PoolFull):
        account.receiving()


class Failing:
    """An outlet that takes one piece and fails at the next."""

    def __init__(self) -> None:
        self.is_ready = True
        self.taken: list[str] = []

    def take(self, piece: Piece) -> None:
        if self.taken:
            raise ValueError("cannot be written")
        self.taken.append(piece.text)

    def take_text(self, index: int, text: str) -> None:
        self.take(Piece(index, text))


async def texts_of(generation: Generation, outlet: Outlet) -> list[str]:
    """The pieces that the reader gets."""
    return [piece.text async for piece in generation.pieces(outlet)]


async def test_an_outlet_that_fails_ends_its_own_stream_alone() -> None:
    failing, tokenizer = Failing(), Tokenizer(checkpoints.byte_level())
    request = GenerationRequest(prompts=("hello",), options=GenerationOptions(max_tokens=8))
    are_reading = asyncio.Event()

    async def wait_and_echo(request: FakeRequest) -> None:
        request.accept()
        await are_reading.wait()
        for token_id in [*request.submission.prompt_token_ids] * 3:
            request.tokens(token_id)
        request.complete(scheduler_pb2.COMPLETION_REASON_LENGTH)

    async with connected(FakeScheduler(behaviour=wait_and_echo)) as client:
        service = GenerationService(tokenizer, client)
        async with service.open(request) as generation, service.open(request) as other:
            reading = asyncio.ensure_future(texts_of(generation, failing))
            answering = asyncio.ensure_future(other.complete())
            await asyncio.sleep(0)
            are_reading.set()
            with pytest.raises(ValueError, match="cannot be written"):
                await soon(reading)
            (answer,) = await soon(answering)
    assert answer.text.startswith(failing.taken[0])
    assert answer.finish_reason is FinishReason.LENGTH


async def test_an_outlet_that_is_not_ready_leaves_all_to_the_reader() -> None:
    closed, tokenizer = Failing(), Tokenizer(checkpoints.byte_level())
    closed.is_ready = False
    request = GenerationRequest(prompts=("hello",), options=GenerationOptions(max_tokens=8))
    async with connected(FakeScheduler()) as client:
        service = GenerationService(tokenizer, client)
        async with service.open(request) as generation, service.open(request) as other:
            texts = await soon(texts_of(generation, closed))
            (answer,) = await soon(other.complete())
    assert "".join(texts) == answer.text != ""
    assert not closed.taken


async def test_a_closed_call_keeps_no_memory() -> None:
    """A thread that writes a long answer may go on after the client has left."""
    async with connected(FakeScheduler()) as client:
        admission = Admission()
        tokenizer = Tokenizer(checkpoints.byte_level())
        service = GenerationService(tokenizer, client, admission=admission)
        request = GenerationRequest(prompts=("x",), options=GenerationOptions(max_tokens=1))
        async with service.open(request) as generation:
            before = admission.budget.n_bytes
            generation.keep(50)
            generation.keep(-20)
            assert admission.budget.n_bytes == before + 30
        generation.keep(50)
        assert admission.budget.n_bytes == 0
