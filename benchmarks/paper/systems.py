"""The systems that the paper compares, by their names in the paper's legends.

`orca(32)` has batches of up to 32 requests, and as many batches in flight as there are stages.
`ft(8,4)` is FasterTransformer with batches of up to 8 requests in microbatches of 4. `cellular(32)`
is BatchMaker's policy on Orca's engine.
"""

import re

from benchmarks.paper.faster_transformer import FasterTransformer
from benchmarks.paper.gpu_costs import Gpu, GpuCosts
from benchmarks.paper.models import PaperModel
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies import Policy, PolicyOptions
from services.scheduler.core.policies.batchmaker import BatchMakerPolicy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from simulator.site import Scheduling

NAME = re.compile(r"(orca|cellular|ft)\((\d+)(?:,(\d+))?\)")
BLOCK_SIZE = 16
N_REQUESTS = 1_000_000
"""Largest number of requests in the pool, large enough to stand for the paper's unbounded queue."""


def scheduling(name: str, model: PaperModel, *, n_in_flight: int | None = None) -> Scheduling:
    """Returns a new scheduler for the system `name`. `n_in_flight` is the number of batches in
    flight of Orca and BatchMaker, by default one for each stage.

    Raises:
        ValueError: the system does not exist, or its batch does not fit into the model's memory.
    """
    kind, max_batch_size, microbatch_size = _parsed(name)
    if kind == "ft":
        return FasterTransformer(
            n_slots=model.n_slots,
            max_batch_size=max_batch_size,
            microbatch_size=microbatch_size or max_batch_size,
        )
    policy: Policy = BatchMakerPolicy(PolicyOptions(max_batch_size))
    if kind == "orca":
        policy = OrcaPolicy(max_batch_size=max_batch_size)
    return Scheduler(
        RequestPool(max_requests=N_REQUESTS),
        KVManager(n_blocks=model.n_slots // BLOCK_SIZE, block_size=BLOCK_SIZE),
        policy=policy,
        pipeline_depth=n_in_flight or model.n_stages,
    )


def costs_of(name: str, model: PaperModel, engines: dict[str, Gpu]) -> GpuCosts:
    """Returns the costs of the engine of the system `name` for a model."""
    return GpuCosts(model, engines["ft" if _parsed(name)[0] == "ft" else "orca"])


def _parsed(name: str) -> tuple[str, int, int | None]:
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"no system {name!r}")
    return match[1], int(match[2]), None if match[3] is None else int(match[3])
