"""A rank that computes nothing: real process, channel, plans, groups and reports, and no model.

    python -m benchmarks.control.null_rank    starts a stage's controller with such ranks

The time of an iteration is then control and the transfer of one hidden state per token between the
stages. Three variables change this: `NULL_ACTIVATIONS=0` removes the transfer, `NULL_COMPUTE_MS=5`
makes the rank sleep for 5 ms in each iteration, and `NULL_IN_BAND=1` sends plans over the data
plane, from rank to rank, before the activations (`benchmarks.control.in_band`).
"""

import os
import sys

import torch
from orcinus.v1 import worker_pb2

from benchmarks.control.in_band import InBandMember, InBandRelay
from benchmarks.control.null_model import compute_s, description
from services.arena.sleeping.without_model import NullRunner, rank_without_model
from services.worker import __main__ as worker
from services.worker.channel import RankEnd
from services.worker.controller.plan_relay import PlanRelay
from services.worker.models.tensor_parallel import SINGLE, TensorParallel
from services.worker.rank import __main__ as rank_process
from services.worker.rank.activity import Activity
from services.worker.rank.data_plane.transport import Transport
from services.worker.rank.epoch_member import EpochMember
from services.worker.rank.membership import Membership
from services.worker.rank.rank import Rank
from services.worker.rank.stage_shard import join_peers
from services.worker.rank.traits import settings_traits
from services.worker.settings import RankSettings

ACTIVATIONS, IN_BAND = "NULL_ACTIVATIONS", "NULL_IN_BAND"


class NullPeers:
    """A data plane that neither sends nor receives anything."""

    tensor_parallel: TensorParallel = SINGLE

    def warm_up(self) -> None:
        pass

    def start_receive(self, hidden: torch.Tensor, iteration: int) -> "NullPeers":
        return self

    def wait(self) -> None:
        pass

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def start(settings: RankSettings, channel: RankEnd, _: Activity) -> Rank:
    """Returns a rank whose runner computes nothing, and which has no watchdog."""
    runner = NullRunner(compute_s())

    def connect(request: worker_pb2.JoinPipelineRequest) -> Transport:
        if os.environ.get(ACTIVATIONS) == "0":
            return NullPeers()
        return join_peers(settings, request)

    def enter(request: worker_pb2.JoinPipelineRequest, peers: Transport) -> EpochMember:
        member = InBandMember if is_in_band() else EpochMember
        return member(request, runner, peers)

    membership = Membership(connect=connect, enter=enter)
    return rank_without_model(settings, channel, description(), membership)


def is_in_band() -> bool:
    return os.environ.get(IN_BAND) == "1"


if __name__ == "__main__":
    if sys.argv[-1].startswith("{"):
        rank_process.main(start, settings_traits)
    plan_relay = InBandRelay if is_in_band() else PlanRelay
    sys.exit(worker.main(rank_module="benchmarks.control.null_rank", plan_relay=plan_relay))
