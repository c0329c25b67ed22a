"""Membership: finds the workers, and makes the members of a pipeline from them.

Workers may start in any order, be unreachable for a while and come back at another address. Workers
without a stage get one by the rule in `muster.py`, and so only workers that fit together become a
pipeline. Until there are enough of them, the workers are asked repeatedly, because workers of two
versions run side by side while one version replaces the other. Workers that do not fit are
reported.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from orcinus.v1 import worker_pb2

from services.common import rpc
from services.common.errors import Unavailable
from services.scheduler.cluster.stages import StageDirectory
from services.scheduler.cluster.term import Term
from services.scheduler.pipeline.asked_worker import AskedWorker
from services.scheduler.pipeline.fit import Traits
from services.scheduler.pipeline.muster import Muster, Offer, muster
from services.scheduler.pipeline.shortfall import Shortfall, UnfitWorker, log_new
from services.scheduler.pipeline.surplus import SETTLE_S, SurplusWatch, to_recall

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Largest number of seconds between two attempts to make a pipeline."""

N_LOST = 64
"""Number of lost pipelines whose members are remembered."""

OnShortfall = Callable[[Shortfall], None]
"""A function that is called when the reason why there is no pipeline changes, or when the set of
workers that do not fit changes."""


@dataclass(frozen=True, slots=True)
class Member:
    """The worker of one stage: its address, and its description of itself."""

    address: str
    description: worker_pb2.DescribeResponse


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline in one epoch: its workers, in the order of their stages."""

    pipeline_id: str
    epoch: int
    members: tuple[Member, ...]
    number: int = 0
    """Number of the pipeline among all that this scheduler has at the same time, from 0. A pipeline
    that is lost gives its number to the next one that forms."""

    @property
    def first(self) -> worker_pb2.DescribeResponse:
        """The description of stage 0, for fields that are equal in all stages."""
        return self.members[0].description

    @property
    def n_stages(self) -> int:
        return len(self.members)

    @property
    def processes(self) -> list[str]:
        """Names of the workers' processes. Each process has chosen its name at random."""
        return [member.description.process for member in self.members]

    @property
    def n_kv_blocks(self) -> int:
        """Largest number of K/V blocks for which every stage has memory."""
        return min(member.description.n_kv_blocks for member in self.members)

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Attention windows of the model's K/V groups, in tokens, or None for a group that attends
        to all tokens."""
        return tuple(window or None for window in self.first.kv_windows) or (None,)

    @property
    def n_state_rows(self) -> int | None:
        """Largest number of requests whose states every stage has memory for. None if the model has
        no layers that keep a state of each request."""
        n_rows = [member.description.n_state_rows for member in self.members]
        return min((n for n in n_rows if n), default=None)


@dataclass(frozen=True, slots=True)
class LastPipeline:
    """A pipeline that was lost. Its members may start again, without a stage."""

    members: tuple[Member, ...] = ()
    gone: int | None = None
    """Index of the stage that was silent, or whose connection has broken; None if there is none. A
    free worker may get this stage at once."""

    def description_of(self, address: str) -> worker_pb2.DescribeResponse | None:
        """Returns the description that the member at an address gave of itself. Returns None if no
        member has the address."""
        found = (it.description for it in self.members if it.address == address)
        return next(found, None)

    def is_gone(self, address: str) -> bool:
        """Returns whether the worker at an address held the stage `gone`."""
        return self.gone is not None and self.members[self.gone].address == address


class RollCall:
    """Asks the workers for their descriptions, and assigns stages to workers without a stage, until
    the workers make a pipeline. Each worker is asked by a task of its own, so that a worker that
    does not answer does not delay the others: one of them may hold or get the same stage."""

    def __init__(
        self,
        stages: StageDirectory,
        term: Term,
        connect: rpc.Connect,
        *,
        on_shortfall: OnShortfall = lambda _: None,
        n_pipelines: Callable[[], int] = lambda: 1,
        serving: Callable[[], Collection[Traits]] = lambda: (),
        is_serving: Callable[[str], bool] = lambda address: False,
        taken: Callable[[], Collection[str]] = tuple,
        may_use_leaving: Callable[[], bool] = lambda: False,
        is_terminating: Callable[[str], bool] = lambda address: False,
        on_return: Callable[[], None] = lambda: None,
        settle_s: float = SETTLE_S,
    ) -> None:
        """`n_pipelines` returns the largest number of pipelines to form out of these workers.
        `serving` returns the traits of the workers in the pipelines that serve already, if there
        are any. `is_serving` returns whether the worker at an address is in a pipeline. `taken`
        returns the names of the processes of workers that stay in their pipelines.
        `may_use_leaving` returns whether workers that are leaving may be members if the others do
        not complete a pipeline. `is_terminating` returns whether the worker at an address is
        leaving, even if its description does not say so. `AskedWorker` describes `on_return`.
        `settle_s` are the seconds after which a spare worker must give up its stage
        (`surplus.py`)."""
        self.trouble = ""
        """The latest reason why the workers do not make a pipeline; empty before the first
        attempt."""
        self._lost: deque[LastPipeline] = deque(maxlen=N_LOST)
        self._on_shortfall = on_shortfall
        self._shortfall: Shortfall | None = None
        self._stages = stages
        self._term = term
        self._connect = connect
        self._n_pipelines = n_pipelines
        self._serving = serving
        self._is_serving = is_serving
        self._taken = taken
        self._may_use_leaving = may_use_leaving
        self._is_terminating = is_terminating
        self._on_return = on_return
        self._surplus = SurplusWatch(asyncio.get_running_loop().time, settle_s)
        self._told: set[str] = set()
        self._has_news = asyncio.Event()
        self._workers: dict[str, AskedWorker] = {}  # by address, in the directory's order
        self._n_assigned: Counter[str] = Counter()

    def note_lost(self, lost: LastPipeline) -> None:
        """Notes a pipeline that was lost. The last descriptions of its members are used until the
        members answer again, for at most `CLAIM_S` seconds."""
        self._lost.appendleft(lost)
        self._surplus.begin_anew()

    async def until_complete(self) -> list[Member]:
        """Waits until every stage has a ready worker, and returns these workers in the order of the
        stages.

        Raises:
            LeadershipLost: another scheduler leads.
        """
        while True:
            self._has_news.clear()
            await self._call(self._stages.addresses())
            try:
                members = await self._members()
                self.trouble = ""
                return members
            except Unavailable as error:
                self._note(error.message)
            # Not `asyncio.wait_for`, which may swallow a cancellation that comes with the news.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._has_news.wait()

    @property
    def newest_epoch(self) -> int:
        """The newest epoch that any worker has seen, or 0 if no worker has answered."""
        return max((answer.epoch for answer in self._answers.values()), default=0)

    async def refresh(self) -> None:
        """Begins to ask the workers that are new in the directory, and stops asking workers that
        are no longer in it."""
        await self._call(self._stages.addresses())

    async def recall_surplus(self) -> None:
        """Makes a spare worker give up its stage if there is a stage that no spare could take over
        (`surplus.py`), and if that has been so for `settle_s` seconds. The process of the spare
        ends, and starts again without a stage. Must be called again and again while no further
        pipeline is to be formed, and only then.

        Raises:
            LeadershipLost: another scheduler leads.
        """
        await self.refresh()
        n_stages = self._stages.n_stages
        surplus = self._surplus.settled(
            to_recall(self._offers(), n_stages, serving=self._serving(), taken=self._taken())
        )
        if surplus is None:
            return
        address, held = surplus.address, surplus.answer.stage_index
        log.info("%s gives up stage %d, to be a spare for all stages", address, held)
        epoch = await self._term.next_epoch(self.newest_epoch)
        self._workers[address].recall(
            worker_pb2.AssignStageRequest(
                epoch=epoch, stage_index=(held + 1) % n_stages, n_stages=n_stages
            )
        )

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
        """Returns the members if each stage has a ready worker. Workers that are leaving are
        members only if the others do not complete a pipeline and `may_use_leaving` allows it.
        Workers of a draining pipeline are members only if there are too few others, because the
        draining pipeline must end first. If stages are missing, assigns them to workers, once every
        worker has answered or failed to answer.

        Raises:
            Unavailable: a stage has no ready worker. The error names the stage, and the workers
            that do not fit.
        """
        answers = self._answers
        offers = self._offers()
        staying = [offer for offer in offers if not offer.is_leaving]
        found = self._muster([offer for offer in staying if not offer.is_serving])
        if not found.can_complete:
            found = self._muster(staying)
        shortfall = self._shortfall_of(found, answers)
        is_settled = all(
            worker.is_settled
            for address, worker in self._workers.items()
            if not self._is_terminating(address)
        )
        if is_settled or found.members:
            self._tell(shortfall)
        chosen = found.members
        if not chosen and is_settled and self._may_use_leaving():
            chosen = self._muster(offers).members
        if found.assignments and is_settled and not found.members:
            epoch = await self._term.next_epoch(self.newest_epoch)
            for address, stage in found.assignments.items():
                self._n_assigned[address] += 1
                self._workers[address].assign(
                    worker_pb2.AssignStageRequest(
                        epoch=epoch, stage_index=stage, n_stages=self._stages.n_stages
                    )
                )
        if chosen:
            members = [Member(address, answers[address]) for address in chosen]
            check_layers(members)
            return members
        troubles = [
            worker.trouble
            for address, worker in self._workers.items()
            if worker.trouble and not self._is_terminating(address)
        ]
        raise Unavailable("; ".join(filter(None, (shortfall.for_operators, *troubles))))

    def _muster(self, offers: Sequence[Offer]) -> Muster:
        return muster(
            offers,
            self._stages.n_stages,
            n_pipelines=self._n_pipelines(),
            n_assigned=self._n_assigned,
            serving=self._serving(),
            taken=self._taken(),
        )

    def _offers(self) -> list[Offer]:
        """Returns the workers whose descriptions are known and not too old, with what else is known
        of each."""
        known = [worker.offer for worker in self._workers.values()]
        return [
            replace(
                offer,
                is_serving=self._is_serving(offer.address),
                is_leaving=offer.answer.is_leaving or self._is_terminating(offer.address),
            )
            for offer in known
            if offer is not None
        ]

    def _shortfall_of(
        self, found: Muster, answers: Mapping[str, worker_pb2.DescribeResponse]
    ) -> Shortfall:
        return Shortfall(
            loading=found.loading,
            missing=found.missing,
            unfit=tuple(
                UnfitWorker(address, answers[address].name, says)
                for address, says in found.unfit.items()
            ),
        )

    def _tell(self, shortfall: Shortfall) -> None:
        """Reports the shortfall if it has changed. Logs each worker that has become unfit."""
        before, self._shortfall = self._shortfall, shortfall
        if shortfall != before:
            log_new(before.unfit if before is not None else (), shortfall.unfit)
            self._on_shortfall(shortfall)

    async def _call(self, addresses: Sequence[str]) -> None:
        """Begins to ask the workers at addresses that are new, and stops asking the workers whose
        addresses are not in `addresses`."""
        for address in self._workers.keys() - set(addresses):
            await self._workers.pop(address).close()
        self._workers = {
            address: self._workers.get(address) or self._new_worker(address)
            for address in addresses
        }

    def _new_worker(self, address: str) -> AskedWorker:
        lost = next((one for one in self._lost if one.description_of(address)), LastPipeline())
        return AskedWorker(
            address,
            self._connect,
            self._has_news.set,
            last=lost.description_of(address),
            is_gone=lost.is_gone(address),
            on_return=self._on_return,
        )

    def _note(self, trouble: str) -> None:
        self.trouble = trouble
        if trouble not in self._told:
            self._told.add(trouble)
            log.info("waiting for the stages: %s", trouble)


def check_layers(members: Sequence[Member]) -> None:
    """Checks that each stage begins with the layer after the last layer of the stage before, and
    that all stages have equal K/V groups. Workers that fit together (`fit.py`) always pass this
    check.

    Raises:
        Unavailable: two stages do not fit. The error names both stages and how they differ.
    """
    next_layer, before = 0, members[0]
    for index, member in enumerate(members):
        first, stage = before.description, member.description
        if stage.first_layer != next_layer:
            raise Unavailable(
                f"stage {index} at {member.address} begins with layer {stage.first_layer}, and "
                f"before it, up to {before.address}, there are {next_layer} layers"
            )
        if stage.kv_windows != first.kv_windows:
            raise Unavailable(
                f"the windows of the K/V groups are {list(first.kv_windows)} at {before.address} "
                f"and {list(stage.kv_windows)} at {member.address}"
            )
        next_layer, before = next_layer + stage.n_layers, member
