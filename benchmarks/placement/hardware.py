"""The pipelines of a simulated fleet: four GPUs each, with costs from data sheets.

The model has the shape of Llama 3.1 70B in bfloat16: 70.6e9 weights, 80 layers, 64 heads of 128
elements, 8 of them with keys and values. A GPU is an H100 SXM: 989e12 operations and 3.35e12 bytes
a second, and 80e9 bytes of memory. The simulation assumes that a GPU reaches half of these
operations and four fifths of this bandwidth, and that nine tenths of its memory hold weights, keys
and values. An iteration also takes 1 ms for launches, and 30 us in each layer for two sums over the
GPUs. Products of up to 128 tokens take no longer than the reading of the weights. The scheduler has
its default settings.
"""

from orcinus.v1 import worker_pb2

from services.scheduler.building import build_scheduler
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.settings import SchedulerSettings
from simulator.costs import LinearCosts

N_GPUS = 4
N_WEIGHTS, WEIGHT_BYTES = 70.6e9, 2
N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM = 80, 64, 8, 128
OPERATIONS_PER_S, BYTES_PER_S = N_GPUS * 989e12 / 2, N_GPUS * 3.35e12 * 0.8
MEMORY_BYTES = N_GPUS * 80e9 * 0.9
LAUNCHES_S = 1e-3 + N_LAYERS * 2 * 15e-6
SLOT_BYTES = 2 * WEIGHT_BYTES * N_LAYERS * N_KV_HEADS * HEAD_DIM
"""Bytes of the keys and values of a token."""
N_SLOTS = int((MEMORY_BYTES - WEIGHT_BYTES * N_WEIGHTS) / SLOT_BYTES)

ITERATION_S = LAUNCHES_S + WEIGHT_BYTES * N_WEIGHTS / BYTES_PER_S
TOKEN_S = 2 * N_WEIGHTS / OPERATIONS_PER_S
"""Seconds of the matrix products of a token, beyond the first 128 of an iteration."""
PAIR_S = 4 * N_LAYERS * N_HEADS * HEAD_DIM / OPERATIONS_PER_S
"""Seconds of the attention of a prompt token to an earlier one."""

COSTS = LinearCosts(
    ((ITERATION_S, 0.0, 0.0, 0.0, 0.0, TOKEN_S, TOKEN_S, 0.0, SLOT_BYTES / BYTES_PER_S, PAIR_S),),
    plan_s=5e-4,
    result_s=5e-4,
)
SETTINGS = SchedulerSettings(stages="gpu:1")
OVERHEAD_TOKENS = 256
"""The time of an iteration in prompt tokens, as a power of two (`prompt_groups.py`)."""


def new_scheduler(pool: RequestPool, *, block_size: int) -> Scheduler:
    """Returns the scheduling core of a pipeline, as a leader builds it, with K/V blocks of
    `block_size` slots."""
    gpu = worker_pb2.DescribeResponse(block_size=block_size, n_kv_blocks=N_SLOTS // block_size)
    scheduler = build_scheduler(SETTINGS, Pipeline("simulated", 1, (Member("", gpu),)), pool)
    scheduler.learn_overhead(OVERHEAD_TOKENS)
    scheduler.adopt()
    return scheduler
