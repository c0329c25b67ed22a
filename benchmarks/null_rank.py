"""A rank that computes nothing: the real process, channel, plans, groups and reports, without a
model.

    python -m benchmarks.null_rank    starts a stage's controller with such a rank

So what is left of an iteration is control, and, unless `NULL_ACTIVATIONS=0`, the transfer of one
hidden state per token between the stages.
"""

import os
import sys

import torch
from orcinus.v1 import worker_pb2

from services.worker import __main__ as worker
from services.worker import rank, transport
from services.worker.channel import RankEnd
from services.worker.epoch_member import EpochMember
from services.worker.input_batch import IterationPlan
from services.worker.settings import RankSettings

HIDDEN_SIZE = 1024
SENDS_ACTIVATIONS = "NULL_ACTIVATIONS"


class NullRunner:
    """Takes any plan and samples token 7."""

    def prepare(self, plan: IterationPlan) -> IterationPlan:
        return plan

    def empty_hidden(self, n_tokens: int) -> torch.Tensor:
        return torch.empty(n_tokens, HIDDEN_SIZE)

    def forward(self, batch: IterationPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        return self.empty_hidden(sum(batch.n_tokens)) if hidden is None else hidden

    def sample(self, batch: IterationPlan, hidden: torch.Tensor) -> torch.Tensor:
        return torch.full((sum(batch.sample),), 7)


class NullPeers:
    """Sends nothing, receives nothing."""

    def receive(self, hidden: torch.Tensor, iteration: int) -> None:
        pass

    def send(self, hidden: torch.Tensor, iteration: int) -> None:
        pass

    def close(self) -> None:
        pass


def start(settings: RankSettings, channel: RankEnd) -> rank.Rank:
    """A rank with a null runner."""
    torch.set_num_threads(1)
    rendezvous = None
    if settings.stage_index == 0:
        rendezvous = transport.create_rendezvous(settings.data_host, settings.rendezvous_port)

    def join(request: worker_pb2.JoinPipelineRequest) -> EpochMember:
        peers = rank.join_peers(settings, request) if sends_activations() else NullPeers()
        return EpochMember(request, NullRunner(), peers)

    return rank.Rank(
        channel,
        worker_pb2.DescribeResponse(
            model="null",
            fingerprint="null",
            stage_index=settings.stage_index,
            n_stages=settings.n_stages,
            tp_size=1,
            first_layer=settings.stage_index,
            n_layers=1,
            vocab_size=1000,
            max_model_len=2048,
            block_size=settings.block_size,
            n_kv_blocks=10_000,
            rendezvous_address=f"{settings.data_host}:{rendezvous.port}" if rendezvous else "",
        ),
        rendezvous=rendezvous,
        report_results=True,
        join=join,
    )


def sends_activations() -> bool:
    return os.environ.get(SENDS_ACTIVATIONS) != "0"


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[2].startswith("{"):
        sys.exit(rank.main(start))
    sys.exit(worker.main(rank_module="benchmarks.null_rank"))
