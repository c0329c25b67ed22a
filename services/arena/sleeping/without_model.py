"""A rank without a model. Its process, channel, plans, process groups and reports are real, and
nothing is computed.

Sampled tokens are taken from a range in turn, so that they differ.
"""

import time
from collections.abc import Sequence

import torch
from orcinus.v1 import worker_pb2

from kernels.forms.logits import Logits
from services.arena.sleeping.sampled_tokens import FIRST_TOKEN_ID, N_TOKENS
from services.common.address import Address
from services.worker.channel import RankEnd
from services.worker.engine.last_tokens import Numbers
from services.worker.engine.plan import IterationPlan
from services.worker.rank.data_plane.rendezvous import create_rendezvous
from services.worker.rank.membership import Membership
from services.worker.rank.rank import Rank
from services.worker.settings import RankSettings

HIDDEN_SIZE = 1024


class NullRunner:
    """A model runner that accepts any plan, sleeps, and returns different tokens in turn as
    sampled."""

    def __init__(self, compute_s: float) -> None:
        self._compute_s = compute_s

    def prepare(self, plan: IterationPlan) -> IterationPlan:
        return plan

    def empty_hidden(self, n_tokens: Sequence[int]) -> torch.Tensor:
        return torch.empty(sum(n_tokens), HIDDEN_SIZE)

    def forward(self, batch: IterationPlan, hidden: torch.Tensor | None) -> torch.Tensor:
        if self._compute_s:
            time.sleep(self._compute_s)
        return self.empty_hidden(batch.n_tokens) if hidden is None else hidden

    def logits(self, batch: IterationPlan, hidden: torch.Tensor | None) -> Logits:
        return Logits(self.forward(batch, hidden))

    def sample(self, batch: IterationPlan, logits: Logits) -> torch.Tensor:
        places = torch.arange(sum(batch.sample) + sum(batch.n_drafts))
        return FIRST_TOKEN_ID + (batch.iteration + 17 * places) % N_TOKENS

    def cut(self, batch: IterationPlan) -> list[int]:
        return []

    def logprobs(self, batch: IterationPlan, logits: Logits, tokens: Numbers) -> None:
        return None

    def vectors(self, batch: IterationPlan, logits: Logits) -> None:
        """Returns None, because no request asks for an embedding."""

    def close(self) -> None:
        pass


def rank_without_model(
    settings: RankSettings,
    channel: RankEnd,
    description: worker_pb2.DescribeResponse,
    membership: Membership,
) -> Rank:
    """Returns a rank that joins pipelines like other ranks, and has one layer that is never
    computed.

    `description` describes the model that the rank seems to have. `settings` has the stage of the
    rank and its index within the stage.
    """
    torch.set_num_threads(1)
    rendezvous = None
    if settings.stage_index == 0 and settings.tp_rank == 0:
        rendezvous = create_rendezvous(settings.data_host, settings.rendezvous_port)
        description.rendezvous_address = str(Address(settings.data_host, rendezvous.port))
    description.stage_index = settings.stage_index
    description.n_stages = settings.n_stages
    description.tp_size = settings.tp_size
    description.first_layer = settings.stage_index
    description.n_layers = 1
    description.block_size = settings.block_size
    return Rank(
        channel,
        description,
        membership,
        rendezvous=rendezvous,
        report_results=settings.tp_rank == 0,
    )
