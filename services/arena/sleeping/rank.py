"""A stage whose ranks compute nothing and sleep for the time of an iteration on a given machine.

    python -m services.arena.sleeping.rank    starts a stage's controller with such ranks

All other parts of the system are real. So a policy, or settings that the tuner has chosen, can be
measured on a machine whose costs are known. A rank that sleeps needs no processor, so other work on
the machine hardly changes the times of its iterations.
"""

import os
import sys
import time
from functools import partial

import torch
from orcinus.v1 import worker_pb2

from services.arena.sleeping.machine_here import machine_here, share_of
from services.arena.sleeping.without_model import NullRunner, rank_without_model
from services.worker import __main__ as worker
from services.worker.channel import RankEnd
from services.worker.engine.plan import IterationPlan
from services.worker.rank import __main__ as rank_process
from services.worker.rank.activity import Activity
from services.worker.rank.epoch_member import EpochMember
from services.worker.rank.membership import Membership
from services.worker.rank.rank import Rank
from services.worker.rank.stage_shard import join_peers
from services.worker.rank.traits import settings_traits
from services.worker.settings import RankSettings
from simulator.costs import IterationWork
from simulator.machines import Machine

MAX_MODEL_LEN = 1024
"""Longest sequence in tokens, if the settings do not limit it."""
SLOT_BYTES = 1000
"""Size of a K/V slot in bytes, summed over all stages and ranks."""


class SleepingRunner(NullRunner):
    """A runner that sleeps for the time of each iteration."""

    def __init__(self, machine: Machine, share: float) -> None:
        super().__init__(0.0)
        self._machine = machine
        self._share = share

    def forward(self, batch: IterationPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        spans = zip(batch.start_positions, batch.n_tokens, batch.sample, strict=True)
        time.sleep(self._share * self._machine.iteration_s(IterationWork.of(spans)))
        return self.empty_hidden(batch.n_tokens) if hidden is None else hidden


def start(settings: RankSettings, channel: RankEnd, _: Activity) -> Rank:
    """Returns a rank that sleeps instead of computing. The rank has no watchdog."""
    n_threads = int(os.environ["OMP_NUM_THREADS"])
    share = share_of(stages=settings.n_stages, tp=settings.tp_size, threads=n_threads)
    runner = SleepingRunner(machine_here(), share)

    block_bytes = SLOT_BYTES * settings.block_size // (settings.n_stages * settings.tp_size)
    description = worker_pb2.DescribeResponse(
        model=settings.served_model_name,
        vocab_size=4096,
        max_model_len=settings.max_model_len or MAX_MODEL_LEN,
        n_kv_blocks=min(100_000, (settings.kv_memory_bytes or 0) // block_bytes),
    )
    membership = Membership(
        connect=partial(join_peers, settings),
        enter=lambda request, peers: EpochMember(request, runner, peers),
    )
    return rank_without_model(settings, channel, description, membership)


if __name__ == "__main__":
    if sys.argv[-1].startswith("{"):
        rank_process.main(start, settings_traits)
    sys.exit(worker.main(rank_module="services.arena.sleeping.rank"))
