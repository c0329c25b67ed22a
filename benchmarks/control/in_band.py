"""Control in band: plans travel over the data plane, from rank to rank, before the activations of
their iteration.

FasterTransformer and Megatron-LM send control messages in this way (Orca, section 4.1), and
`benchmarks.control.plane` compares it with Orca's. The controller gives each plan to the first rank
of stage 0. That rank sends the plan to the other ranks of its stage and to the next stage as two
tensors, a length and the bytes. A rank learns of an iteration only when the plan arrives, and can
receive activations only after reading the plan.
"""

from collections import deque
from typing import Any, cast

import torch
from orcinus.v1 import worker_pb2

from services.worker.channel import MessageKind
from services.worker.controller.plan_relay import PlanRelay
from services.worker.rank.data_plane.group_transport import GroupTransport, transfer
from services.worker.rank.data_plane.groups import MAX_TAG
from services.worker.rank.epoch_member import EpochMember

PLAN_TAG = MAX_TAG - 1


class InBandRelay(PlanRelay):
    """Sends each plan to the first rank of the first stage only, instead of to all ranks."""

    async def forward(self, plan: bytes) -> None:
        self._ranks[0].send(MessageKind.PLAN, plan)


class InBandMember(EpochMember):
    """Receives plans from the previous rank and sends them to the next rank.

    Ranks form a chain: the ranks of a stage one after the other, followed by the first rank of the
    next stage. The controller gives the plans to the first rank of the chain.
    """

    def __init__(self, request: worker_pb2.JoinPipelineRequest, runner: Any, peers: Any) -> None:
        super().__init__(request, runner, peers)
        transport = cast(GroupTransport, peers)
        self._place, self._group = transport.place, transport.pipeline
        self._sends: deque[tuple[Any, torch.Tensor]] = deque(maxlen=64)

    @property
    def n_announced(self) -> int:
        """Number of plans that this rank may start. On the first rank, this is the number of
        received plans. On every other rank, this is always 1, because `start_next` itself waits for
        the plan."""
        return len(self._announced) if self._place.world_rank == 0 else 1

    def start_next(self) -> None:
        if self._place.world_rank == 0:
            plan = self._announced[0].message.SerializeToString()
        else:
            plan = self._receive_plan()
            self.announce(worker_pb2.RunIterationsRequest.FromString(plan))
        if self._place.world_rank + 1 < self._place.world_size:
            self._send_plan(plan)
        super().start_next()

    def _receive_plan(self) -> bytes:
        length = torch.empty(1, dtype=torch.int64)
        self._receive(length)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._receive(data)
        return data.numpy().tobytes()

    def _receive(self, tensor: torch.Tensor) -> None:
        with transfer("the chain of plans is broken"):
            self._group.recv([tensor], self._place.world_rank - 1, PLAN_TAG).wait()

    def _send_plan(self, plan: bytes) -> None:
        data = torch.frombuffer(bytearray(plan), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), data):
            with transfer("the chain of plans is broken"):
                work = self._group.send([tensor], self._place.world_rank + 1, PLAN_TAG)
            self._sends.append((work, tensor))  # not waited for, as activations are not
