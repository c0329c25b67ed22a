"""A stage whose ranks sleep for what a machine's iterations take, and compute nothing.

    python -m benchmarks.sleeping.rank    starts a stage's controller with such ranks

Everything else is real, so that what the tuner finds can be compared with what is best. A rank that
sleeps needs no processor: whatever else runs on the machine hardly changes its times.
"""

import os
import sys
import time

import torch
from orcinus.v1 import worker_pb2

from benchmarks.null_rank import NullRunner
from benchmarks.sleeping.machines import Machine, machine_here, share_of
from services.worker import __main__ as worker
from services.worker.channel import RankEnd
from services.worker.engine.plan import IterationPlan
from services.worker.rank import __main__ as rank_process
from services.worker.rank.activity import Activity
from services.worker.rank.data_plane.rendezvous import create_rendezvous
from services.worker.rank.data_plane.transport import Transport
from services.worker.rank.epoch_member import EpochMember
from services.worker.rank.membership import Membership
from services.worker.rank.rank import Rank
from services.worker.rank.stage_shard import join_peers
from services.worker.settings import RankSettings
from simulator.costs import Work

SLOT_BYTES = 1000
"""Bytes of a K/V slot, of all stages and ranks together."""


class SleepingRunner(NullRunner):
    """Sleeps for what an iteration takes."""

    def __init__(self, machine: Machine, share: float) -> None:
        super().__init__(0.0)
        self._machine = machine
        self._share = share

    def forward(self, batch: IterationPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        spans = zip(batch.start_positions, batch.n_tokens, batch.sample, strict=True)
        time.sleep(self._share * self._machine.iteration_s(Work.of(spans)))
        return self.empty_hidden(batch.n_tokens) if hidden is None else hidden


def start(settings: RankSettings, channel: RankEnd, _: Activity) -> Rank:
    """Returns a rank with a sleeping runner, which is not watched."""
    torch.set_num_threads(1)
    n_threads = int(os.environ["OMP_NUM_THREADS"])
    share = share_of(stages=settings.n_stages, tp=settings.tp_size, threads=n_threads)
    runner = SleepingRunner(machine_here(), share)
    rendezvous = None
    if settings.stage_index == 0 and settings.tp_rank == 0:
        rendezvous = create_rendezvous(settings.data_host, settings.rendezvous_port)

    def enter(request: worker_pb2.JoinPipelineRequest, peers: Transport) -> EpochMember:
        return EpochMember(request, runner, peers)

    def connect(request: worker_pb2.JoinPipelineRequest) -> Transport:
        return join_peers(settings, request)

    block_bytes = SLOT_BYTES * settings.block_size // (settings.n_stages * settings.tp_size)
    return Rank(
        channel,
        worker_pb2.DescribeResponse(
            model=settings.served_model_name,
            fingerprint="sleeping",
            stage_index=settings.stage_index,
            n_stages=settings.n_stages,
            tp_size=settings.tp_size,
            first_layer=settings.stage_index,
            n_layers=1,
            vocab_size=4096,
            max_model_len=1024,
            block_size=settings.block_size,
            n_kv_blocks=min(100_000, (settings.kv_memory_bytes or 0) // block_bytes),
            rendezvous_address=f"{settings.data_host}:{rendezvous.port}" if rendezvous else "",
        ),
        Membership(connect=connect, enter=enter),
        rendezvous=rendezvous,
        report_results=settings.tp_rank == 0,
    )


if __name__ == "__main__":
    if sys.argv[-1].startswith("{"):
        rank_process.main(start)
    sys.exit(worker.main(rank_module="benchmarks.sleeping.rank"))
