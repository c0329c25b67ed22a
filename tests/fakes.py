"""Stand-ins for the parts of Orcinus that a test does not want to run for real."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc, rpc_handlers
from services.common.protocol import PROTOCOL
from services.scheduler.core.batch import Batch
from services.worker.channel import MessageKind
from services.worker.controller.controller import Controller
from services.worker.controller.service import RAW_METHODS, SERVICE, WorkerService
from services.worker.settings import PipelinePlace
from tests.limits import HANG_S

TRAITS = {"model": "fake", "block_size": "4", "dtype": "float32"}
"""Properties of a worker. Workers fit together if these properties are equal."""


def describe_stage(
    stage_index: int = 0, n_stages: int = 1, *, block_size: int = 4, model: str = "fake"
) -> worker_pb2.DescribeResponse:
    """Returns the description of a stage with two layers."""
    return worker_pb2.DescribeResponse(
        model=model,
        traits=TRAITS | {"block_size": str(block_size), "model": model},
        stage_index=stage_index,
        n_stages=n_stages,
        tp_size=1,
        first_layer=2 * stage_index,
        n_layers=2,
        vocab_size=100,
        max_model_len=64,
        eos_token_ids=[2],
        can_follow_grammars=stage_index + 1 == n_stages,
        block_size=block_size,
        n_kv_blocks=50 - stage_index,
        rendezvous_address="127.0.0.1:1",
        protocol=PROTOCOL,
        state=worker_pb2.WORKER_STATE_READY,
    )


@dataclass
class FakeRank:
    """A rank that joins a pipeline at once and stores the plans that it gets. It answers plans only
    if `answers` is true or the test calls `answer`."""

    controller: Controller
    stage_index: int = 0
    n_stages: int = 1
    answers: bool = False
    block_size: int = 4
    model: str = "fake"
    joins: bool = True
    plans: list[bytes] = field(default_factory=list)
    has_plan: asyncio.Event = field(default_factory=asyncio.Event)
    grammars: asyncio.Queue[worker_pb2.PrepareGrammarRequest] = field(default_factory=asyncio.Queue)

    def tell_traits(self) -> None:
        """Reports to the controller the properties that decide which workers fit together."""
        told = worker_pb2.DescribeResponse(
            traits=TRAITS | {"block_size": str(self.block_size), "model": self.model}
        )
        self.controller.on_message(0, MessageKind.TRAITS, told.SerializeToString())

    def load(self) -> None:
        """Reports to the controller that the weights are loaded."""
        description = describe_stage(
            self.stage_index, self.n_stages, block_size=self.block_size, model=self.model
        )
        self.controller.on_message(0, MessageKind.LOADED, description.SerializeToString())

    def send(self, kind: MessageKind, payload: bytes) -> None:
        """Handles a message from the controller."""
        if kind is MessageKind.JOIN:
            request = worker_pb2.JoinPipelineRequest.FromString(payload)
            if self.joins:
                self.controller.on_message(0, MessageKind.JOINED, str(request.epoch).encode())
        elif kind is MessageKind.PLAN:
            self.plans.append(payload)
            self.has_plan.set()
            if self.answers:
                self.answer(payload)
        elif kind is MessageKind.PREPARE_GRAMMAR:
            self.grammars.put_nowait(worker_pb2.PrepareGrammarRequest.FromString(payload))

    async def next_grammar(self) -> worker_pb2.PrepareGrammarRequest:
        """Waits for the next grammar that the rank must compile, and returns it."""
        return await asyncio.wait_for(self.grammars.get(), HANG_S)

    def compile(self, grammar: worker_pb2.PrepareGrammarRequest, failure: str = "") -> None:
        """Reports that the rank has compiled a grammar, or the reason why it could not."""
        answer = worker_pb2.PrepareGrammarResponse(digest=grammar.digest, failure=failure)
        self.controller.on_message(0, MessageKind.GRAMMAR_PREPARED, answer.SerializeToString())

    def answer(self, payload: bytes) -> None:
        """Reports that the iteration of the plan `payload` has run: with the tokens 10, 11, … on
        the last stage, and only with a timing on the other stages."""
        plan = worker_pb2.RunIterationsRequest.FromString(payload)
        report = worker_pb2.WatchStageResponse(pipeline_id=plan.pipeline_id, epoch=plan.epoch)
        timing = worker_pb2.IterationTiming(iteration=plan.iteration, compute_ns=1000)
        if self.stage_index + 1 == self.n_stages:
            report.result.iteration = plan.iteration
            n_sampled = sum(plan.sample) + sum(plan.n_drafts)
            report.result.token_ids.extend(10 + i for i in range(n_sampled))
            report.result.timing.CopyFrom(timing)
        else:
            report.timings.timings.append(timing)
        self.controller.on_message(0, MessageKind.REPORT, report.SerializeToString())


@dataclass
class FakeStage:
    """A real controller on a real socket, with a fake rank."""

    controller: Controller
    rank: FakeRank
    address: str

    async def join(self, epoch: int) -> None:
        """Makes the stage join an epoch of a pipeline without other stages, as a request from
        another leader would."""
        async with rpc.connect(self.address) as channel:
            request = worker_pb2.JoinPipelineRequest(
                pipeline_id="orcinus",
                epoch=epoch,
                members=[self.address],
                tp_size=1,
                n_kv_blocks=50,
            )
            await worker_pb2_grpc.WorkerServiceStub(channel).JoinPipeline(request)


@contextlib.asynccontextmanager
async def fake_stage(
    stage_index: int = 0,
    n_stages: int = 1,
    *,
    answers: bool = False,
    loads: bool = True,
    block_size: int = 4,
    model: str = "fake",
) -> AsyncIterator[FakeStage]:
    """Serves a stage on loopback. With `loads`, its rank has already loaded its weights."""
    controller = Controller(tp_size=1, place=PipelinePlace(stage_index, n_stages))
    rank = FakeRank(controller, stage_index, n_stages, answers, block_size, model)
    controller.attach([rank])
    rank.tell_traits()
    if loads:
        rank.load()
    async with _served(controller) as address:
        controller.name = f"pod:{address.rpartition(':')[2]}"
        yield FakeStage(controller, rank, address)


@contextlib.asynccontextmanager
async def fake_worker(
    *, answers: bool = False, loads: bool = True, block_size: int = 4
) -> AsyncIterator[FakeStage]:
    """Serves a worker without a stage on loopback. With `loads`, its rank reports that it has
    loaded its weights as soon as the worker has been assigned a stage."""
    controller = Controller(tp_size=1)
    rank = FakeRank(controller, answers=answers, block_size=block_size)
    rank.tell_traits()

    async def be_assigned() -> None:
        place = await controller.assignment.wait()
        rank.stage_index, rank.n_stages = place.stage_index, place.n_stages
        controller.attach([rank])
        if loads:
            rank.load()

    waiting = asyncio.create_task(be_assigned())
    try:
        async with _served(controller) as address:
            controller.name = f"pod:{address.rpartition(':')[2]}"
            yield FakeStage(controller, rank, address)
    finally:
        waiting.cancel()


@contextlib.asynccontextmanager
async def _served(controller: Controller) -> AsyncIterator[str]:
    server = rpc.create_server()
    handler = rpc_handlers.service_handler(SERVICE, WorkerService(controller), raw=RAW_METHODS)
    server.add_generic_rpc_handlers((handler,))
    address = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield address
    finally:
        await controller.close()
        await server.stop(grace=0)


@contextlib.asynccontextmanager
async def fake_stages(n_stages: int, *, answers: bool = False) -> AsyncIterator[list[FakeStage]]:
    """Serves all stages of a pipeline on loopback."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(fake_stage(index, n_stages, answers=answers))
            for index in range(n_stages)
        ]


@dataclass
class FakeEngine:
    """An engine that keeps batches in flight until the test lets the oldest one return."""

    has_news: asyncio.Event
    batches: list[Batch] = field(default_factory=list)
    error: Exception | None = None
    _results: list[worker_pb2.IterationResult] = field(default_factory=list)
    _has_batch: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, batch: Batch) -> None:
        """Adds a batch to the batches in flight."""
        self.batches.append(batch)
        self._has_batch.set()

    def take_results(self) -> Sequence[worker_pb2.IterationResult]:
        """Returns the results since the last call. Raises the error of `fail`, if there is one."""
        if self.error is not None:
            raise self.error
        results, self._results = self._results, []
        return results

    async def next_batch(self) -> Batch:
        """Waits until a batch is in flight, and returns the oldest one."""
        while not self.batches:
            self._has_batch.clear()
            await asyncio.wait_for(self._has_batch.wait(), HANG_S)
        return self.batches[0]

    async def return_oldest(
        self, token_id: int = 5, logprobs: Sequence[worker_pb2.SpanLogprobs] = ()
    ) -> Batch:
        """Lets the oldest batch return with the token `token_id` for every sampled span, and
        returns the batch."""
        batch = await self.next_batch()
        del self.batches[0]
        n_sampled = sum(span.is_sampled for span in batch.spans) + batch.n_drafts
        self._results.append(
            worker_pb2.IterationResult(
                iteration=batch.iteration,
                token_ids=[token_id] * n_sampled,
                logprobs=logprobs,
                timing=worker_pb2.IterationTiming(iteration=batch.iteration),
            )
        )
        self.has_news.set()
        return batch

    def fail(self, error: Exception) -> None:
        """Makes the engine fail with an error, as if the pipeline were lost."""
        self.error = error
        self.has_news.set()
