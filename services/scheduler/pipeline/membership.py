"""Membership: the stages there are, and whether they can form one pipeline.

Stages may start in any order, be unreachable for a while and come back at another address. What
they say of themselves must agree before an epoch is formed; until then they are asked again, since
stages of two versions stand side by side while one replaces the other.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.common.errors import Unavailable
from services.common.protocol import PROTOCOL
from services.scheduler.cluster.stages import StageDirectory
from services.scheduler.cluster.term import Term

log = logging.getLogger(__name__)

RETRY_S = 0.2
DESCRIBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Member:
    """A stage and its description of itself."""

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
        """The description of stage 0, which stands for all where all agree."""
        return self.members[0].description

    @property
    def n_stages(self) -> int:
        return len(self.members)

    @property
    def n_kv_blocks(self) -> int:
        """Number of K/V blocks that every stage has room for."""
        return min(member.description.n_kv_blocks for member in self.members)


async def gather(
    stages: StageDirectory,
    *,
    term: Term,
    pipeline_id: str,
    timeout_s: float,
    connect: rpc.Connect = rpc.connect,
) -> Pipeline:
    """Waits until all stages have loaded and agree, and makes the next epoch of them.

    Raises:
        Unavailable: it took too long; says what was missing last.
        LeadershipLost: another scheduler leads.
    """
    call = RollCall(stages, connect)
    try:
        async with asyncio.timeout(timeout_s):
            members = await call.until_complete()
    except TimeoutError:
        raise Unavailable(
            f"no pipeline within {timeout_s:g} s: {call.trouble or _absence(stages.missing)}"
        ) from None
    finally:
        await call.close()
    epoch = await term.next_epoch(max(member.description.epoch for member in members))
    return Pipeline(pipeline_id, epoch, tuple(members))


class RollCall:
    """Asks the stages for their descriptions, until these fit together."""

    def __init__(self, stages: StageDirectory, connect: rpc.Connect) -> None:
        self.trouble = ""
        """The latest reason why the stages do not form a pipeline; empty before the first."""
        self._stages = stages
        self._connect = connect
        self._told: set[str] = set()
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def until_complete(self) -> list[Member]:
        """Returns all members, in the order of their stages."""
        while True:
            try:
                addresses = await self._stages.addresses()
                await self._forget_all_but(addresses)
                members = await asyncio.gather(*(self._describe(item) for item in addresses))
                check_agreement(members)
            except Unavailable as error:
                self._note(error.message)
                await asyncio.sleep(RETRY_S)
            else:
                return members

    async def close(self) -> None:
        """Closes the channels to the stages."""
        await self._forget_all_but(())

    async def _describe(self, address: str) -> Member:
        if address not in self._channels:
            self._channels[address] = self._connect(address, rpc.RECONNECT_OPTIONS)
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels[address])
        try:
            description = await stub.Describe(
                worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"stage at {address}: {error.details()}") from error
        return Member(address, description)

    async def _forget_all_but(self, addresses: Sequence[str]) -> None:
        for address in self._channels.keys() - set(addresses):
            await self._channels.pop(address).close(grace=None)

    def _note(self, trouble: str) -> None:
        self.trouble = trouble
        if trouble not in self._told:
            self._told.add(trouble)
            log.info("waiting for the stages: %s", trouble)


def check_agreement(members: Sequence[Member]) -> None:
    """Checks that all stages have one build and one model, and that their shapes fit.

    Raises:
        Unavailable: names the first stage that does not fit.
    """
    first = members[0].description
    next_layer = 0
    for index, member in enumerate(members):
        stage = member.description
        expected = {
            "protocol": PROTOCOL,
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


def _absence(missing: Sequence[int]) -> str:
    return f"nothing is known of stage {', '.join(map(str, missing))}"
