"""Real stages, joined again and again by one engine master after another: weights stay, nothing
else does."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from orcinus.v1.sampling_pb2 import SamplingParams

from services.local.child import Child
from services.scheduler.cluster.stages import StaticStages
from services.scheduler.cluster.term import Unopposed
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.engine_master import EngineMaster
from services.scheduler.pipeline.pipeline_lost import PipelineLost
from tests.checkpoints import Oracle
from tests.gathering import gather
from tests.limits import HANG_S
from tests.scheduler.core.workload import build

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [9, 8, 7, 6, 5]
N_STAGES = 2
GREEDY = SamplingParams(temperature=0).SerializeToString()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def addresses(model: Path) -> AsyncIterator[list[str]]:
    """Two workers in processes of their own; shared, so nobody may harm them."""
    children = [
        await Child.start(
            f"stage {index}",
            "services.worker",
            [
                f"--model={model}",
                "--address=127.0.0.1:0",
                f"--stage-index={index}",
                f"--n-stages={N_STAGES}",
                "--kv-memory=1MiB",
                "--n-threads=1",
            ],
        )
        for index in range(N_STAGES)
    ]
    try:
        yield [await child.wait_for("address") for child in children]
    finally:
        await asyncio.gather(*(child.stop() for child in children))


class Run:
    """One epoch, driven by hand."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.news = asyncio.Event()
        self.engine: EngineMaster

    async def __aenter__(self) -> "Run":
        pipeline = await gather(
            StaticStages(self.addresses), term=Unopposed(), pipeline_id="p", timeout_s=HANG_S
        )
        self.engine = EngineMaster(
            pipeline,
            wake=self.news.set,
            on_timing=lambda *_: None,
            silence_limit_s=60,
            iteration_limit_s=60,
            hang_limit_s=60,
        )
        await self.engine.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.engine.close()

    async def iterate(self, scheduler: Scheduler) -> None:
        """Selects, runs and applies one batch."""
        batch = scheduler.select()
        assert batch is not None
        await self.engine.run(batch)
        await asyncio.wait_for(self.news.wait(), HANG_S)
        self.news.clear()
        for result in self.engine.take_results():
            scheduler.apply(result.iteration, result.token_ids)

    async def generate(self, n_tokens: int) -> list[int]:
        """Greedy tokens of one request that nobody shares an iteration with."""
        scheduler = build(max_batch_size=1, n_blocks=8, block_size=16, pipeline_depth=1)
        request = Request(RequestId("r"), PROMPT, n_tokens, sampling=GREEDY)
        scheduler.submit(request)
        while len(scheduler.pool):
            await self.iterate(scheduler)
        return list(request.generated_token_ids)


async def test_each_epoch_starts_afresh_and_computes_the_same(
    model: Path, addresses: list[str]
) -> None:
    epochs, answers = [], []
    for _ in range(3):
        async with Run(addresses) as run:
            epochs.append(run.engine.pipeline.epoch)
            answers.append(await run.generate(6))
    assert epochs == [epochs[0], epochs[0] + 1, epochs[0] + 2]
    expected = Oracle(model).generate(PROMPT, 6)
    assert answers == [expected] * 3


async def test_a_deposed_master_loses_its_pipeline_to_the_newer_one(addresses: list[str]) -> None:
    async with Run(addresses) as old:
        assert len(await old.generate(2)) == 2
        async with Run(addresses) as new:
            assert new.engine.pipeline.epoch == old.engine.pipeline.epoch + 1
            await asyncio.wait_for(old.news.wait(), HANG_S)
            with pytest.raises(PipelineLost, match="not the current epoch"):
                old.engine.take_results()
            assert len(await new.generate(3)) == 3
