"""The pipelines of a simulated fleet. Each has four GPUs, and the costs of the machine `four H100`
(`simulator.machines`). The scheduler has its default settings."""

from orcinus.v1 import worker_pb2

from services.scheduler.building import build_scheduler
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.settings import SchedulerSettings
from simulator.machines import MACHINES, MachineCosts

MACHINE = MACHINES["four H100"]
COSTS = MachineCosts(MACHINE)
SETTINGS = SchedulerSettings(stages="gpu:1")
OVERHEAD_TOKENS = 256
"""The fixed time of an iteration, expressed as the number of prompt tokens that take as long: a
power of two (`prompt_groups.py`)."""


def new_scheduler(pool: RequestPool, *, block_size: int) -> Scheduler:
    """Returns the scheduling core of a pipeline, built as a leader builds it, with K/V blocks of
    `block_size` slots."""
    gpu = worker_pb2.DescribeResponse(
        block_size=block_size, n_kv_blocks=MACHINE.n_slots // block_size
    )
    scheduler = build_scheduler(SETTINGS, Pipeline("simulated", 1, (Member("", gpu),)), pool)
    scheduler.learn_overhead(OVERHEAD_TOKENS)
    scheduler.adopt()
    return scheduler
