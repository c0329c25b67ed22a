"""Forms a pipeline from workers, as a leading scheduler does."""

import asyncio

from services.common import rpc
from services.common.errors import Unavailable
from services.scheduler.cluster.stages import StageDirectory
from services.scheduler.cluster.term import Term
from services.scheduler.pipeline.membership import OnShortfall, Pipeline, RollCall


async def gather(
    stages: StageDirectory,
    *,
    term: Term,
    pipeline_id: str,
    timeout_s: float,
    connect: rpc.Connect = rpc.connect,
    on_shortfall: OnShortfall = lambda _: None,
) -> Pipeline:
    """Waits until each stage has a worker, and returns the pipeline of the next epoch.

    Raises:
        Unavailable: there was no pipeline within `timeout_s` seconds. The error says what was
            missing last.
    """
    call = RollCall(stages, term, connect, on_shortfall=on_shortfall)
    try:
        async with asyncio.timeout(timeout_s):
            members = await call.until_complete()
            seen = call.newest_epoch
    except TimeoutError:
        raise Unavailable(f"no pipeline within {timeout_s:.3g} s: {call.trouble}") from None
    finally:
        await call.close()
    return Pipeline(pipeline_id, await term.next_epoch(seen), tuple(members))
