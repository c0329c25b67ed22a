"""Which stages there are, and whether they can form one pipeline.

Here the stages are given as addresses, in order. They may start in any order and be unreachable
for a while; what they say of themselves must agree before an epoch is formed.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import Unavailable
from services.common.rpc import connect

log = logging.getLogger(__name__)

RETRY_S = 0.2
DESCRIBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Member:
    """A stage and what it says of itself."""

    address: str
    description: worker_pb2.DescribeResponse


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The members of one epoch, in the order of their stages."""

    pipeline_id: str
    epoch: int
    members: tuple[Member, ...]

    @property
    def first(self) -> worker_pb2.DescribeResponse:
        """Stage 0, which speaks for all where all agree."""
        return self.members[0].description

    @property
    def n_stages(self) -> int:
        return len(self.members)

    @property
    def n_kv_blocks(self) -> int:
        """Blocks that every stage has room for."""
        return min(member.description.n_kv_blocks for member in self.members)


async def gather(addresses: Sequence[str], *, pipeline_id: str, timeout_s: float) -> Pipeline:
    """Waits until all stages have loaded, and makes the next epoch of them.

    Raises:
        Unavailable: a stage did not answer in time, or the stages do not fit together.
    """
    try:
        async with asyncio.timeout(timeout_s):
            members = await asyncio.gather(*(_describe(address) for address in addresses))
    except TimeoutError:
        raise Unavailable(
            f"not all of the stages {', '.join(addresses)} were ready within {timeout_s:g} s"
        ) from None
    check_agreement(members)
    epoch = 1 + max(member.description.epoch for member in members)
    return Pipeline(pipeline_id, epoch, tuple(members))


def check_agreement(members: Sequence[Member]) -> None:
    """Refuses stages of different builds, models or shapes.

    Raises:
        Unavailable: names the first stage that does not fit.
    """
    first = members[0].description
    next_layer = 0
    for index, member in enumerate(members):
        stage = member.description
        expected = {
            "stage_index": index,
            "n_stages": len(members),
            "first_layer": next_layer,
            "model": first.model,
            "fingerprint": first.fingerprint,
            "tp_size": first.tp_size,
            "block_size": first.block_size,
        }
        for field, value in expected.items():
            if getattr(stage, field) != value:
                raise Unavailable(
                    f"{member.address} cannot be stage {index} of {len(members)}: "
                    f"its {field} is {getattr(stage, field)}, not {value}"
                )
        next_layer += stage.n_layers


async def _describe(address: str) -> Member:
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        while True:
            try:
                description = await stub.Describe(
                    worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as error:
                if error.code() not in _NOT_YET:
                    raise Unavailable(f"stage {address}: {error.details()}") from error
                log.debug("stage %s is not ready: %s", address, error.details())
                await asyncio.sleep(RETRY_S)
            else:
                return Member(address, description)


_NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
