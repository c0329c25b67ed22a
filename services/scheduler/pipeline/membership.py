"""Membership: finds the workers, and makes the members of a pipeline from them.

Workers may start in any order, be unreachable for a while and come back at another address. Workers
without a stage get one by the rule in `muster.py`. An epoch is formed only when the descriptions of
all stages agree. Until then the workers are asked again and again, since workers of two versions
run side by side while one version replaces the other.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from orcinus.v1 import worker_pb2, worker_pb2_grpc

from services.common import rpc
from services.common.errors import Unavailable
from services.common.outage import Outage
from services.common.protocol import MAX_KV_BLOCKS, PROTOCOL
from services.scheduler.cluster.stages import StageDirectory
from services.scheduler.cluster.term import Term
from services.scheduler.pipeline.muster import Muster, muster

log = logging.getLogger(__name__)

RETRY_S = 0.2
DESCRIBE_TIMEOUT_S = 3.0
"""Seconds after which a worker that does not answer counts as absent, so that a stage that no other
worker holds is assigned to a free one."""

MAX_KV_GROUPS = 16
"""Largest number of K/V groups of a model."""

CLAIM_S = 10.0
"""Seconds for which a stage is not assigned to another worker after the worker that holds the stage
has stopped answering. The silent worker may be busy, or start again."""


@dataclass(frozen=True, slots=True)
class Member:
    """The worker of one stage: its address, and its description of itself."""

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
        """The description of stage 0, for fields that are equal in all stages."""
        return self.members[0].description

    @property
    def n_stages(self) -> int:
        return len(self.members)

    @property
    def n_kv_blocks(self) -> int:
        """Largest number of K/V blocks for which every stage has memory."""
        return min(member.description.n_kv_blocks for member in self.members)

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Attention windows of the model's K/V groups, in tokens; None for a group that attends to
        all tokens."""
        return tuple(window or None for window in self.first.kv_windows) or (None,)

    @property
    def n_state_rows(self) -> int | None:
        """Largest number of requests for which every stage has room to keep states. None if the
        model has no layers that keep a state of each request."""
        n_rows = [member.description.n_state_rows for member in self.members]
        return min((n for n in n_rows if n), default=None)


async def gather(
    stages: StageDirectory,
    *,
    term: Term,
    pipeline_id: str,
    timeout_s: float,
    connect: rpc.Connect = rpc.connect,
) -> Pipeline:
    """Waits until each stage has a worker that has loaded its weights and all workers agree, and
    returns them as the pipeline of the next epoch. Assigns stages that no worker holds.

    Raises:
        Unavailable: there was no pipeline within `timeout_s`; the error says what was missing last.
        LeadershipLost: another scheduler leads.
    """
    call = RollCall(stages, term, connect)
    try:
        async with asyncio.timeout(timeout_s):
            members = await call.until_complete()
            seen = call.newest_epoch
    except TimeoutError:
        raise Unavailable(
            f"no pipeline within {timeout_s:.3g} s: {call.trouble or 'no worker has answered'}"
        ) from None
    finally:
        await call.close()
    epoch = await term.next_epoch(seen)
    return Pipeline(pipeline_id, epoch, tuple(members))


class RollCall:
    """Asks the workers for their descriptions, and assigns stages to workers without a stage, until
    the workers make a pipeline. A task for each worker asks that worker, so that a worker that does
    not answer delays no other worker: another worker may hold or get the same stage."""

    def __init__(self, stages: StageDirectory, term: Term, connect: rpc.Connect) -> None:
        self.trouble = ""
        """The latest reason why the workers do not make a pipeline; empty before the first
        attempt."""
        self._stages = stages
        self._term = term
        self._connect = connect
        self._told: set[str] = set()
        self._has_news = asyncio.Event()
        self._workers: dict[str, _Worker] = {}  # by address, in the directory's order
        self._n_assigned: Counter[str] = Counter()

    async def until_complete(self) -> list[Member]:
        """Returns all members, in the order of their stages.

        Raises:
            LeadershipLost: another scheduler leads.
        """
        while True:
            self._has_news.clear()
            await self._call(self._stages.addresses())
            try:
                return await self._members()
            except Unavailable as error:
                self._note(error.message)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), RETRY_S)

    @property
    def newest_epoch(self) -> int:
        """The newest epoch that any worker has seen; 0 if no worker has answered."""
        return max((answer.epoch for answer in self._answers.values()), default=0)

    async def close(self) -> None:
        """Stops asking the workers, and closes the channels to them."""
        await self._call(())

    @property
    def _answers(self) -> dict[str, worker_pb2.DescribeResponse]:
        return {
            address: worker.description
            for address, worker in self._workers.items()
            if worker.description is not None
        }

    async def _members(self) -> list[Member]:
        """Returns the members if each stage has one. Otherwise assigns the missing stages, once
        every worker has answered or failed to answer, and raises.

        Raises:
            Unavailable: a stage has no ready worker, or the members do not agree; the error says
                which.
        """
        answers = self._answers
        claims = (worker.claim for worker in self._workers.values())
        found = muster(
            answers,
            self._stages.n_stages,
            claimed={stage for stage in claims if stage is not None},
            n_assigned=self._n_assigned,
        )
        if found.members:
            members = [Member(address, answers[address]) for address in found.members]
            check_agreement(members)
            return members
        if found.assignments and all(worker.is_settled for worker in self._workers.values()):
            epoch = await self._term.next_epoch(self.newest_epoch)
            for address, stage in found.assignments.items():
                self._n_assigned[address] += 1
                self._workers[address].assign(
                    worker_pb2.AssignStageRequest(
                        epoch=epoch, stage_index=stage, n_stages=self._stages.n_stages
                    )
                )
        raise Unavailable(self._shortfall(found))

    def _shortfall(self, found: Muster) -> str:
        said = []
        if found.loading:
            said.append(f"weights are loaded on stage {_listed(found.loading)}")
        if found.missing:
            said.append(f"there is no worker for stage {_listed(found.missing)}")
        said += [worker.trouble for worker in self._workers.values() if worker.trouble]
        return "; ".join(said)

    async def _call(self, addresses: Sequence[str]) -> None:
        """Begins to ask the workers at new addresses, and closes workers whose addresses are
        gone."""
        for address in self._workers.keys() - set(addresses):
            await self._workers.pop(address).close()
        self._workers = {
            address: self._workers.get(address)
            or _Worker(address, self._connect, self._has_news.set)
            for address in addresses
        }

    def _note(self, trouble: str) -> None:
        self.trouble = trouble
        if trouble not in self._told:
            self._told.add(trouble)
            log.info("waiting for the stages: %s", trouble)


class _Worker:
    """A worker that is asked repeatedly for its description."""

    def __init__(self, address: str, connect: rpc.Connect, on_news: Callable[[], None]) -> None:
        self.address = address
        self.description: worker_pb2.DescribeResponse | None = None
        """The worker's latest answer; None if the worker did not answer the latest question."""
        self.trouble = ""
        self.is_settled = False
        """Whether the worker has answered or failed to answer since a stage was last assigned to
        it."""
        self._channel = connect(address, rpc.RECONNECT_OPTIONS)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._on_news = on_news
        self._outage = Outage(f"the worker at {address}")
        self._order: worker_pb2.AssignStageRequest | None = None
        self._claim: tuple[int, float] | None = None  # a stage, and when the claim ends
        self._asking = asyncio.create_task(self._ask_on())

    @property
    def claim(self) -> int | None:
        """The stage that the worker held when it stopped answering; None once that was `CLAIM_S`
        ago, or while the worker answers."""
        if self.description is not None or self._claim is None:
            return None
        stage, until = self._claim
        return stage if asyncio.get_running_loop().time() < until else None

    def assign(self, order: worker_pb2.AssignStageRequest) -> None:
        """Assigns a stage to the worker. The worker is not settled until it has answered again with
        a description."""
        log.info("stage %d is assigned to %s", order.stage_index, self.address)
        self._order = order
        self.description, self.is_settled = None, False
        self._hold(order.stage_index)

    async def close(self) -> None:
        """Stops asking the worker."""
        self._asking.cancel()
        await asyncio.wait((self._asking,))
        await self._channel.close(grace=None)

    async def _ask_on(self) -> None:
        while True:
            order, self._order = self._order, None
            try:
                if order is not None:
                    await self._stub.AssignStage(order, timeout=DESCRIBE_TIMEOUT_S)
                answer = await self._stub.Describe(
                    worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
                )
            except grpc.aio.AioRpcError as error:
                self._outage.note_failure(error.details() or error.code().name)
                self._take(None, f"worker at {self.address}: {error.details()}")
            else:
                self._outage.note_answer()
                self._take(answer, "")
            await asyncio.sleep(RETRY_S)

    def _take(self, answer: worker_pb2.DescribeResponse | None, trouble: str) -> None:
        if self._order is not None:
            return  # the answer is older than the order
        self.description, self.trouble, self.is_settled = answer, trouble, True
        if answer is not None:
            self._claim = None
            if answer.state != worker_pb2.WORKER_STATE_FREE:
                self._hold(answer.stage_index)
        self._on_news()

    def _hold(self, stage: int) -> None:
        self._claim = (stage, asyncio.get_running_loop().time() + CLAIM_S)


def check_agreement(members: Sequence[Member]) -> None:
    """Checks that all stages have the same version of the code, the same model and the same shapes,
    and that the layers of each stage follow those of the stage before.

    Raises:
        Unavailable: a stage does not fit; the error names the first such stage.
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
            "kv_windows": first.kv_windows,
        }
        for field, value in expected.items():
            if getattr(stage, field) != value:
                raise Unavailable(
                    f"{member.address} cannot be stage {index} of {len(members)}: "
                    f"its {field} is {getattr(stage, field)}, not {value}"
                )
        if not (stage.block_size > 0 and 0 < stage.n_kv_blocks <= MAX_KV_BLOCKS):
            raise Unavailable(
                f"{member.address} cannot be stage {index}: it has {stage.n_kv_blocks} K/V blocks "
                f"of {stage.block_size} slots, and from 1 to {MAX_KV_BLOCKS} can be accounted for"
            )
        windows = list(stage.kv_windows)
        if len(windows) > MAX_KV_GROUPS or 0 in windows[windows.count(0) :]:
            raise Unavailable(
                f"{member.address} cannot be stage {index}: the windows of its K/V groups are "
                f"{windows}"
            )
        next_layer += stage.n_layers


def _listed(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))
