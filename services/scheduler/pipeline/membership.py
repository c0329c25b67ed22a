"""Membership: the workers there are, and how they become one pipeline.

Workers may start in any order, be unreachable for a while and come back at another address. Those
without a stage are given one (`muster` has the rule). What they say of themselves must agree before
an epoch is formed; until then they are asked again, since stages of two versions stand side by side
while one replaces the other.
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
"""K/V groups of a model at most."""

CLAIM_S = 10.0
"""Seconds for which a stage is not assigned to another worker while its own worker, which has
answered before, does not answer: that one may be busy, or start again."""


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

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The windows of the model's K/V groups; None for one that sees everything."""
        return tuple(window or None for window in self.first.kv_windows) or (None,)

    @property
    def n_state_rows(self) -> int | None:
        """Largest number of requests at a time, since every stage whose layers keep a state of each
        request has room for as many; None where no layer does."""
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
    """Waits until there is a worker for each stage, all have loaded and agree, and makes the next
    epoch of them; assigns stages that no worker holds.

    Raises:
        Unavailable: it took too long; the error says what was missing last.
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
    """Asks the workers for their descriptions, and assigns stages to workers that have none, until
    they are a pipeline. Each is asked by itself, so that a worker that does not answer holds up no
    other: another one may be that stage, or become it."""

    def __init__(self, stages: StageDirectory, term: Term, connect: rpc.Connect) -> None:
        self.trouble = ""
        """The latest reason why the stages do not form a pipeline; empty before the first."""
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
        """The newest epoch that any of the workers has seen."""
        return max((answer.epoch for answer in self._answers.values()), default=0)

    async def close(self) -> None:
        """Ends all questions, and the channels to the workers."""
        await self._call(())

    @property
    def _answers(self) -> dict[str, worker_pb2.DescribeResponse]:
        return {
            address: worker.description
            for address, worker in self._workers.items()
            if worker.description is not None
        }

    async def _members(self) -> list[Member]:
        """Returns the members if there is one for each stage, else assigns the missing stages.

        Raises:
            Unavailable: a stage is missing; the error says which.
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
        """Begins to ask workers that are new, and forgets workers that are gone."""
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
        """The worker's latest answer; None if it did not answer the latest question."""
        self.trouble = ""
        self.is_settled = False
        """Whether the worker has answered, or failed to, since it was told of a stage."""
        self._channel = connect(address, rpc.RECONNECT_OPTIONS)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._on_news = on_news
        self._order: worker_pb2.AssignStageRequest | None = None
        self._claim: tuple[int, float] | None = None  # a stage, and until when
        self._asking = asyncio.create_task(self._ask_on())

    @property
    def claim(self) -> int | None:
        """The stage that it held when it fell silent, for CLAIM_S."""
        if self.description is not None or self._claim is None:
            return None
        stage, until = self._claim
        return stage if asyncio.get_running_loop().time() < until else None

    def assign(self, order: worker_pb2.AssignStageRequest) -> None:
        """Tells the worker its stage; the worker is not settled until it has described itself
        again."""
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
                self._take(None, f"worker at {self.address}: {error.details()}")
            else:
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
