"""The engine master against real controllers on real sockets; only the ranks are fake."""

import asyncio
import signal
import time
from collections.abc import Callable

import pytest
from orcinus.v1 import worker_pb2

from services.common.errors import Unavailable
from services.common.iteration_limit import IterationSize
from services.scheduler.cluster.stages import StaticStages
from services.scheduler.cluster.term import Unopposed
from services.scheduler.core.admission.grammar_gate import DueGrammar
from services.scheduler.pipeline.engine_master import EngineMaster
from services.scheduler.pipeline.grammar_preparation import GrammarPreparation
from services.scheduler.pipeline.pipeline_lost import PipelineLost
from services.worker.channel import MessageKind
from tests.fakes import FakeStage, fake_stages
from tests.gathering import gather
from tests.limits import HANG_S
from tests.scheduler.core.workload import Arrival, build, request_for


class Master:
    """An engine master on fake stages, and what it says."""

    def __init__(
        self,
        stages: list[FakeStage],
        *,
        silence_limit_s: float = 60,
        iteration_limit_s: float = 60,
        hang_limit_s: float = 60,
    ) -> None:
        self.stages = stages
        self.silence_limit_s = silence_limit_s
        self.iteration_limit_s = iteration_limit_s
        self.hang_limit_s = hang_limit_s
        self.news = asyncio.Event()
        self.timings: list[tuple[int, int]] = []
        self.engine: EngineMaster

    async def __aenter__(self) -> "Master":
        stages = StaticStages([stage.address for stage in self.stages])
        pipeline = await gather(stages, term=Unopposed(), pipeline_id="p", timeout_s=HANG_S)
        self.engine = EngineMaster(
            pipeline,
            wake=self.news.set,
            on_timing=lambda stage, timing: self.timings.append((stage, timing.iteration)),
            silence_limit_s=self.silence_limit_s,
            iteration_limit_s=self.iteration_limit_s,
            hang_limit_s=self.hang_limit_s,
        )
        await self.engine.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.engine.close()

    async def results(self) -> list[worker_pb2.IterationResult]:
        await asyncio.wait_for(self.news.wait(), HANG_S)
        self.news.clear()
        return self.engine.take_results()


def sign_of_life(master: Master) -> bytes:
    """Returns the report that a stage sends however busy it is."""
    return worker_pb2.WatchStageResponse(
        pipeline_id=master.engine.pipeline.pipeline_id,
        epoch=master.engine.pipeline.epoch,
        heartbeat=worker_pb2.StageHeartbeat(),
    ).SerializeToString()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_batches_go_round_the_pipeline_and_come_back_from_the_last_stage() -> None:
    scheduler = build(max_batch_size=2, n_blocks=20, block_size=4, pipeline_depth=2)
    for index in range(3):
        scheduler.submit(
            request_for(index, Arrival(0, n_prompt=5, max_new_tokens=3, n_iterations=3))
        )
    async with fake_stages(2, answers=True) as stages, Master(stages) as master:
        results: list[worker_pb2.IterationResult] = []
        for _ in range(2):
            batch = scheduler.select()
            assert batch is not None
            await master.engine.run(batch)
        while len(results) < 2:
            results += await master.results()
        assert [list(result.token_ids) for result in results] == [[10, 11], [10]]
        first, second = (
            worker_pb2.RunIterationsRequest.FromString(data) for data in stages[1].rank.plans
        )
        assert [(a.row, a.n_prompt_tokens) for a in first.admissions] == [(0, 5), (1, 5)]
        assert list(first.n_tokens) == [5, 5]
        assert list(first.n_new_blocks) == [2, 2]
        assert len(first.token_ids) == 10
        assert [a.row for a in second.admissions] == [2]
        await asyncio.wait_for(_until(lambda: len(master.timings) == 4), HANG_S)
        assert sorted(master.timings) == [(0, 1), (0, 2), (1, 1), (1, 2)]


async def test_the_last_stage_compiles_a_grammar() -> None:
    async with fake_stages(2) as stages, Master(stages) as master:
        grammars = master.engine.grammars
        grammars.begin(DueGrammar(b"d", b"start: /d/", (b"k", b"d")))
        assert grammars.take() is None
        grammar = await stages[1].rank.next_grammar()
        assert (grammar.digest, grammar.grammar) == (b"d", "start: /d/")
        assert list(grammar.kept_digests) == [b"k", b"d"]
        stages[1].rank.compile(grammar)
        await asyncio.wait_for(master.news.wait(), HANG_S)
        assert grammars.take() == (b"d", "")
        assert grammars.take() is None


async def test_a_grammar_that_is_not_compiled_in_time_ends_no_epoch() -> None:
    async with fake_stages(1) as stages, Master(stages) as master:
        engine = master.engine
        grammars = GrammarPreparation(
            engine._stubs[0], 1, wake=master.news.set, on_lost=engine._lose, limit_s=0.1
        )
        grammars.begin(DueGrammar(b"d", b"start: /d/", ()))
        await asyncio.wait_for(master.news.wait(), HANG_S)
        assert grammars.take() == (b"d", "not compiled within 0.1 s")
        assert engine.take_results() == []
        late = await stages[0].rank.next_grammar()
        stages[0].rank.compile(late)  # which is too late
        master.news.clear()
        engine.grammars.begin(DueGrammar(b"d", b"start: /d/", ()))
        stages[0].rank.compile(await stages[0].rank.next_grammar())
        await asyncio.wait_for(master.news.wait(), HANG_S)
        assert engine.grammars.take() == (b"d", "")


@pytest.mark.parametrize("is_epoch_over", [False, True])
async def test_a_stage_that_is_gone_while_it_compiles_ends_the_epoch(is_epoch_over: bool) -> None:
    async with fake_stages(1) as stages, Master(stages) as master:
        master.engine.grammars.begin(DueGrammar(b"d", b"start: /d/", ()))
        await stages[0].rank.next_grammar()
        if is_epoch_over:
            stages[0].controller.grammar_orders.end()
        else:
            stages[0].controller.on_exit(0, -9)
        with pytest.raises(PipelineLost):
            await master.results()
        assert master.engine.grammars.take() is None


@pytest.mark.parametrize("stage_index", [0, 1, 2])
async def test_a_stage_whose_rank_dies_ends_the_epoch_with_the_reason(stage_index: int) -> None:
    async with fake_stages(3) as stages, Master(stages) as master:
        stages[stage_index].controller.on_exit(0, -9)
        with pytest.raises(PipelineLost, match=f"stage {stage_index} failed: rank 0 exited"):
            await master.results()


@pytest.mark.parametrize(
    ("kind", "is_by_itself"),
    [(MessageKind.FAILURE, True), (MessageKind.REFUSAL, False)],
    ids=["an error", "a refusal"],
)
async def test_a_rank_that_fails_by_itself_is_told_from_one_that_does_not(
    kind: MessageKind, is_by_itself: bool
) -> None:
    async with fake_stages(1) as stages, Master(stages) as master:
        stages[0].controller.on_message(0, kind, b"why")
        with pytest.raises(PipelineLost, match="why") as lost:
            await master.results()
    assert (lost.value.is_by_itself, lost.value.iteration) == (is_by_itself, 0)


@pytest.mark.parametrize(
    ("status", "is_by_itself"),
    [
        (-signal.SIGKILL, False),
        (-signal.SIGTERM, False),
        (0, False),
        (-signal.SIGSEGV, True),
        (1, True),
    ],
    ids=str,
)
async def test_a_rank_that_is_killed_has_not_failed_by_itself(
    status: int, is_by_itself: bool
) -> None:
    async with fake_stages(1) as stages, Master(stages) as master:
        stages[0].controller.on_exit(0, status)
        with pytest.raises(PipelineLost, match=f"exited with status {status}") as lost:
            await master.results()
    assert lost.value.is_by_itself == is_by_itself


async def test_the_iteration_that_broke_off_is_named() -> None:
    async with fake_stages(1) as stages, Master(stages) as master:
        report = worker_pb2.WatchStageResponse.FromString(sign_of_life(master))
        report.failure.reason = "MemoryError: no memory"
        report.failure.iteration = 7
        report.failure.is_by_itself = True
        stages[0].controller.on_message(0, MessageKind.REPORT, report.SerializeToString())
        with pytest.raises(PipelineLost, match="stage 0 failed: MemoryError") as lost:
            await master.results()
    assert (lost.value.is_by_itself, lost.value.iteration) == (True, 7)


async def test_a_silent_stage_ends_the_epoch() -> None:
    async with fake_stages(2) as stages, Master(stages, silence_limit_s=0.3) as master:
        with pytest.raises(PipelineLost, match="silent"):
            await master.results()


async def test_an_iteration_that_never_returns_ends_the_epoch_of_lively_stages() -> None:
    scheduler = build(max_batch_size=2, n_blocks=20, block_size=4, pipeline_depth=1)
    scheduler.submit(request_for(0, Arrival(0, n_prompt=5, max_new_tokens=3, n_iterations=3)))
    async with fake_stages(1) as stages, Master(stages, iteration_limit_s=1) as master:
        batch = scheduler.select()
        assert batch is not None
        await master.engine.run(batch)
        while not master.news.is_set():
            stages[0].controller.on_message(0, MessageKind.REPORT, sign_of_life(master))
            await asyncio.sleep(0.1)
        with pytest.raises(PipelineLost, match="iteration 1 has not returned"):
            master.engine.take_results()


async def test_an_iteration_that_takes_too_long_for_its_size_ends_the_epoch() -> None:
    scheduler = build(max_batch_size=2, n_blocks=20, block_size=4, pipeline_depth=1)
    scheduler.submit(request_for(0, Arrival(0, n_prompt=5, max_new_tokens=3, n_iterations=3)))
    async with fake_stages(1) as stages, Master(stages, hang_limit_s=1) as master:
        batch = scheduler.select()
        assert batch is not None
        await master.engine.run(batch)
        await asyncio.sleep(2)  # twice as long, while nothing is known of this machine
        await asyncio.wait_for(stages[0].rank.has_plan.wait(), HANG_S)
        stages[0].rank.answer(stages[0].rank.plans[0])
        [result] = await master.results()
        for _ in range(50):  # many more like it
            master.engine._lateness._limit.learn(IterationSize.of([0], [5]), 0.001)
        scheduler.apply(result.iteration, result.token_ids)
        batch = scheduler.select()
        assert batch is not None
        await master.engine.run(batch)
        with pytest.raises(PipelineLost, match=r"iteration 2 has not returned in 1\.\d s"):
            await master.results()


@pytest.mark.thorough
async def test_a_scheduler_that_was_stopped_takes_nobody_for_silent() -> None:
    async with fake_stages(1) as stages, Master(stages, silence_limit_s=1) as master:
        time.sleep(2)  # noqa: ASYNC251 - as if it were stopped
        stages[0].controller.on_message(0, MessageKind.REPORT, sign_of_life(master))
        await asyncio.sleep(0.6)  # it looks at least once
        assert master.engine.take_results() == []


async def test_a_stage_that_cannot_forward_plans_ends_the_epoch() -> None:
    scheduler = build(max_batch_size=1, n_blocks=20, block_size=4, pipeline_depth=2)
    scheduler.submit(request_for(0, Arrival(0, n_prompt=5, max_new_tokens=3, n_iterations=3)))
    async with fake_stages(2, answers=True) as stages, Master(stages) as master:
        batch = scheduler.select()
        assert batch is not None
        await master.engine.run(batch)
        [result] = await master.results()
        scheduler.apply(result.iteration, result.token_ids)
        next_stage = stages[0].controller.plans._next
        assert next_stage is not None
        next_stage.cancel()  # as a network does that loses this one connection
        batch = scheduler.select()
        assert batch is not None
        await master.engine.run(batch)
        with pytest.raises(PipelineLost, match="stage 0 lost another stage: the next stage takes"):
            await master.results()


async def test_the_cause_of_a_loss_counts_also_if_a_neighbour_reports_first() -> None:
    async with fake_stages(2) as stages, Master(stages) as master:
        for index, failure in enumerate(
            (
                worker_pb2.StageFailure(reason="closed by peer", is_of_neighbour=True),
                worker_pb2.StageFailure(reason="exited with status -11", is_by_itself=True),
            )
        ):
            report = worker_pb2.WatchStageResponse.FromString(sign_of_life(master))
            report.failure.CopyFrom(failure)
            stages[index].controller.on_message(0, MessageKind.REPORT, report.SerializeToString())
        with pytest.raises(PipelineLost, match="status -11") as lost:
            await master.results()
        assert lost.value.is_by_itself


async def test_a_bug_in_taking_reports_in_is_not_taken_for_silence() -> None:
    async with fake_stages(1) as stages, Master(stages) as master:
        master.timings = None  # type: ignore[assignment]
        timing = worker_pb2.WatchStageResponse.FromString(sign_of_life(master))
        timing.timings.timings.add(iteration=1)
        stages[0].controller.on_message(0, MessageKind.REPORT, timing.SerializeToString())
        with pytest.raises(AttributeError):
            await master.results()


@pytest.mark.thorough
async def test_signs_of_life_keep_an_idle_pipeline() -> None:
    async with fake_stages(1) as stages, Master(stages, silence_limit_s=1.5) as master:
        for _ in range(12):
            await asyncio.sleep(0.2)
            stages[0].controller.on_message(0, MessageKind.REPORT, sign_of_life(master))
        assert master.engine.take_results() == []


async def test_a_report_of_another_epoch_is_dropped() -> None:
    async with fake_stages(1) as stages, Master(stages) as master:
        stale = worker_pb2.WatchStageResponse(
            pipeline_id="p", epoch=99, result=worker_pb2.IterationResult(iteration=1)
        )
        fresh = worker_pb2.WatchStageResponse(
            pipeline_id="p",
            epoch=master.engine.pipeline.epoch,
            result=worker_pb2.IterationResult(iteration=2),
        )
        for report in (stale, fresh):
            stages[0].controller.on_message(0, MessageKind.REPORT, report.SerializeToString())
        assert [result.iteration for result in await master.results()] == [2]


async def test_each_pipeline_formed_of_the_same_stages_has_a_newer_epoch() -> None:
    async with fake_stages(1) as stages:
        epochs = []
        for _ in range(3):
            async with Master(stages) as master:
                epochs.append(master.engine.pipeline.epoch)
        assert epochs == [1, 2, 3]


async def test_stages_that_never_come_up_are_named() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1\b"):
        await gather(StaticStages(["127.0.0.1:1"]), term=Unopposed(), pipeline_id="p", timeout_s=1)


async def test_log_probabilities_of_several_reports_come_with_their_iteration() -> None:
    scheduler = build(max_batch_size=1, n_blocks=20, block_size=4, pipeline_depth=1)
    request = request_for(0, Arrival(0, n_prompt=5, max_new_tokens=1, n_iterations=1))
    request.n_logprobs, request.n_prompt_logprobs = 4, 0
    scheduler.submit(request)
    async with fake_stages(1) as stages, Master(stages) as master:
        batch = scheduler.select()
        assert batch is not None
        await master.engine.run(batch)
        epoch = master.engine.pipeline.epoch
        first, second = (
            worker_pb2.SpanLogprobs(span=0, prompt_position=position, logprobs=b"x")
            for position in (1, 3)
        )
        reports = (
            worker_pb2.WatchStageResponse(
                pipeline_id="p",
                epoch=epoch,
                logprobs=worker_pb2.IterationLogprobs(iteration=1, logprobs=[first]),
            ),
            worker_pb2.WatchStageResponse(
                pipeline_id="p",
                epoch=epoch,
                result=worker_pb2.IterationResult(iteration=1, token_ids=[7], logprobs=[second]),
            ),
        )
        for report in reports:
            stages[0].controller.on_message(0, MessageKind.REPORT, report.SerializeToString())
        [result] = await master.results()
        assert list(result.logprobs) == [first, second]
        await asyncio.wait_for(stages[0].rank.has_plan.wait(), HANG_S)
        [plan] = map(worker_pb2.RunIterationsRequest.FromString, stages[0].rank.plans)
        [admission] = plan.admissions
        assert (admission.n_logprobs, admission.n_prompt_logprobs) == (4, 0)
        assert admission.HasField("n_prompt_logprobs")
        assert not plan.next_token_ids


async def test_a_stage_whose_connection_ends_is_known_to_be_gone() -> None:
    async with fake_stages(2) as stages, Master(stages) as master:
        stages[1].controller.reports.end()
        with pytest.raises(PipelineLost, match="stage 1 ended its reports") as lost:
            await master.results()
    assert lost.value.gone == 1
