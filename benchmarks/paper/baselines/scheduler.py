"""`python -m benchmarks.paper.baselines.scheduler`: a scheduler process that runs a baseline."""

import sys
from typing import Literal

from pydantic import Field

from services.scheduler import __main__ as scheduler
from services.scheduler.building import build_scheduler, default_depth
from services.scheduler.core.policies import PolicyOptions
from services.scheduler.core.policies.request_level import RequestLevelPolicy
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.whole_batches import WholeBatchScheduler
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.settings import SchedulerSettings

Baseline = Literal["request_level", "microbatch"]


class BaselineSchedulerSettings(SchedulerSettings):
    """The settings of the scheduler, and the name of the baseline."""

    baseline: Baseline = "request_level"
    """`request_level`: request-level scheduling of `pipeline_depth` batches at a time.
    `microbatch`: request-level scheduling of one batch at a time, in microbatches."""

    microbatch_size: int = Field(default=8, ge=1)
    """Largest number of requests in a microbatch."""


def build(settings: SchedulerSettings, pipeline: Pipeline, pool: RequestPool) -> Scheduler:
    """Returns the scheduler of the baseline that the settings name, for one pipeline.

    Raises:
        Unavailable: the memory is too small for one block.
    """
    if not isinstance(settings, BaselineSchedulerSettings):
        raise TypeError(f"{type(settings).__name__} does not say which baseline")
    depth = settings.pipeline_depth or default_depth(pipeline.n_stages)
    if settings.baseline == "microbatch":
        policy = RequestLevelPolicy(
            PolicyOptions(settings.max_batch_size), microbatch_size=settings.microbatch_size
        )
    else:
        n_batches = 1 if pipeline.n_stages == 1 else depth
        policy = RequestLevelPolicy(PolicyOptions(settings.max_batch_size, n_shares=n_batches))
    return build_scheduler(settings, pipeline, pool, make=WholeBatchScheduler, policy=policy)


if __name__ == "__main__":
    sys.exit(scheduler.main(BaselineSchedulerSettings, build))
