"""Spares of a pipeline that serves, on real sockets: one that does not fit is named."""

import asyncio

from services.scheduler.cluster.term import Unopposed
from services.scheduler.pipeline.shortfall import UnfitWorker
from services.scheduler.pipeline.spare_watch import SpareWatch
from tests.fakes import fake_stages, fake_worker
from tests.gathering import gather
from tests.scheduler.core.workload import build
from tests.scheduler.pipeline.test_membership import LIMIT_S, workers


async def test_a_spare_that_comes_while_a_pipeline_serves_is_named_if_it_does_not_fit() -> None:
    async with (
        fake_stages(2) as stages,
        fake_worker() as good,
        fake_worker(block_size=8) as odd,
    ):
        known = workers(2, *stages)
        pipeline = await gather(known, term=Unopposed(), pipeline_id="p", timeout_s=LIMIT_S)
        told: asyncio.Queue[tuple[UnfitWorker, ...]] = asyncio.Queue()
        watch = SpareWatch(known, on_unfit=told.put_nowait, period_s=0.01)
        epoch = watch.observe(
            pipeline, build(max_batch_size=1, n_blocks=4, block_size=4, pipeline_depth=1)
        )
        async with asyncio.timeout(LIMIT_S):
            epoch.opened()
            assert await told.get() == ()
            known.known += [good.address, odd.address, "127.0.0.1:1"]
            while not (unfit := await told.get()):
                pass
            assert unfit == (UnfitWorker(odd.address, odd.controller.name, "block_size 8, not 4"),)
            known.known.remove(odd.address)
            while await told.get():
                pass
        epoch.closed(None)
