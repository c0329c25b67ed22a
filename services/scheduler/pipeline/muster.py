"""The rule by which workers become the stages of a pipeline.

A worker holds one stage, or none yet; the answer to `Describe` says which. Workers whose traits are
equal form a group, and a pipeline is made of one group. The first of these groups is chosen:

1. a group with a ready worker for every stage;
2. a group that can get one, since it has enough workers;
3. among those, the group that holds the most stages, or held them until a moment ago, then the
   largest group, then the group of the newest pod.

In the group that is chosen, a worker that holds a stage keeps it, since the weights of the stage
are in its memory. A stage that no worker holds is assigned to a free worker. The workers that are
left over are spares. Two workers may hold the same stage, after one of them did not answer for a
while: the other worker is a spare that can take over the stage at once.

Workers of other groups stay as they are. If no group has enough workers, each group loads what it
can, so that the first group that becomes large enough loses no time, whichever worker came first.

This module only decides: `membership.py` asks the workers and carries out the assignments.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from orcinus.v1 import worker_pb2

from services.scheduler.pipeline.fit import Traits, differences, fault_of, traits_of


class Presence(Enum):
    """Whether a worker answers."""

    HERE = "the worker answers"
    SILENT = "the worker has just stopped answering; it may be busy, and keeps its stage"
    ENDED = "the worker's process has just ended; it may start again, without a stage"


@dataclass(frozen=True, slots=True)
class Offer:
    """A worker: its address, its latest description of itself, and whether it answers."""

    address: str
    answer: worker_pb2.DescribeResponse
    presence: Presence = Presence.HERE


@dataclass(frozen=True, slots=True)
class Muster:
    """The members of a pipeline, or, while the pipeline is incomplete, the assignments that
    complete it."""

    members: tuple[str, ...] = ()
    """Address of one ready worker for each stage, in the order of stages; empty while a stage has
    no ready worker."""

    assignments: Mapping[str, int] = field(default_factory=dict)
    """The stage to assign to each worker, by the worker's address."""

    loading: tuple[int, ...] = ()
    """Stages whose worker is still loading weights."""

    missing: tuple[int, ...] = ()
    """Stages without a worker."""

    unfit: Mapping[str, str] = field(default_factory=dict)
    """For each worker that stays out of the pipeline because it does not fit, by its address: in
    what it differs. If no group has enough workers and there are several groups, the workers of all
    groups."""


def muster(
    offers: Sequence[Offer], n_stages: int, *, n_assigned: Mapping[str, int] | None = None
) -> Muster:
    """Returns the members of a pipeline, or the assignments that lead to one.

    `offers` are the workers, older pods first. `n_assigned` is the number of earlier assignments to
    each worker. Free workers with fewer assignments come first, since a worker that cannot load its
    weights becomes free again and again.
    """
    faults = _faults_of(offers, n_stages)
    sound = [offer for offer in offers if offer.address not in faults and traits_of(offer.answer)]
    starting = {
        offer.answer.stage_index
        for offer in offers
        if offer.answer.state == worker_pb2.WORKER_STATE_LOADING
        and offer.address not in faults
        and not traits_of(offer.answer)
    }
    groups: dict[Traits, _Group] = {}
    for place, offer in enumerate(sound):
        group = _Group(n_stages, n_assigned or {}, starting)
        groups.setdefault(traits_of(offer.answer), group).add(place, offer)
    if not groups:
        empty = _Group(n_stages, {}, starting)
        unfit = _unfit(offers, faults, None)
        return Muster(loading=empty.loading, missing=empty.missing, unfit=unfit)
    chosen = max(groups, key=lambda traits: groups[traits].rank)
    best = groups[chosen]
    if best.is_complete:
        assigning: list[_Group] = []
    else:
        assigning = [best] if best.can_complete else list(groups.values())
    return Muster(
        members=best.members,
        assignments={k: v for group in assigning for k, v in group.assignments.items()},
        loading=best.loading,
        missing=best.missing,
        unfit=_unfit(offers, faults, chosen if best.can_complete else None),
    )


def unfit_beside(offers: Sequence[Offer], chosen: Traits, n_stages: int) -> dict[str, str]:
    """Returns, by its address, each worker that does not fit the running pipeline, and in what it
    differs. `chosen` are the traits of the workers in the pipeline."""
    return _unfit(offers, _faults_of(offers, n_stages), chosen)


def _faults_of(offers: Sequence[Offer], n_stages: int) -> dict[str, str]:
    """Returns what is wrong with each worker that can be in no pipeline of `n_stages` stages."""
    faults = {offer.address: fault_of(offer.answer, n_stages) for offer in offers}
    return {address: fault for address, fault in faults.items() if fault}


def _unfit(
    offers: Sequence[Offer], faults: Mapping[str, str], chosen: Traits | None
) -> dict[str, str]:
    """Returns the workers that answer and do not fit, and in what each differs."""
    here = [offer for offer in offers if offer.presence is Presence.HERE]
    faulty = {offer.address: faults[offer.address] for offer in here if offer.address in faults}
    traits = {
        offer.address: traits_of(offer.answer)
        for offer in here
        if offer.address not in faults and offer.answer.traits
    }
    return faulty | differences(traits, chosen)


class _Group:
    """Workers with equal traits, and the choice among workers of one stage. A ready worker is
    better than a worker that loads; then a worker whose stage is fixed is better; then a worker
    that has seen a newer epoch; then a newer pod."""

    def __init__(
        self, n_stages: int, n_assigned: Mapping[str, int], starting: Collection[int]
    ) -> None:
        """`starting` are the stages of workers whose traits are not known yet. Their settings name
        the stages."""
        self._starting = starting
        self._n_stages = n_stages
        self._n_assigned = n_assigned
        self._places: dict[str, int] = {}  # by address; higher ones are newer
        self._here: dict[str, worker_pb2.DescribeResponse] = {}
        self._claimed = set(starting)
        self._n_ended = 0

    def add(self, place: int, offer: Offer) -> None:
        """Adds a worker. `place` is the higher, the newer its pod is."""
        self._places[offer.address] = place
        if offer.presence is Presence.HERE:
            self._here[offer.address] = offer.answer
        elif offer.presence is Presence.ENDED and not offer.answer.is_fixed:
            self._n_ended += 1
        elif self._holds_a_stage(offer.answer):
            self._claimed.add(offer.answer.stage_index)

    @property
    def rank(self) -> tuple[bool, bool, int, int, int]:
        """The group's rank. The group with the highest rank is chosen."""
        n_held = self._n_stages - max(0, len(self._to_assign) - self._n_ended)
        size, newest = len(self._places), max(self._places.values())
        return (self.is_complete, self.can_complete, n_held, size, newest)

    @property
    def members(self) -> tuple[str, ...]:
        """Ready workers of all stages, in the order of the stages. The result is empty if a stage
        has no ready worker."""
        ready = [self._best(stage, only_ready=True) for stage in range(self._n_stages)]
        members = tuple(address for address in ready if address is not None)
        return members if len(members) == self._n_stages else ()

    @property
    def is_complete(self) -> bool:
        """Whether each stage has a ready worker."""
        return bool(self.members)

    @property
    def can_complete(self) -> bool:
        """Whether there is a worker for each stage, a process that starts again included."""
        return len(self._takers) + self._n_ended >= len(self._to_assign)

    @property
    def assignments(self) -> dict[str, int]:
        """The stage to assign to each worker."""
        return dict(zip(self._takers, self._to_assign, strict=False))

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages whose worker does not answer, or that no worker holds."""
        return tuple(
            stage
            for stage, holder in enumerate(self._holders)
            if holder is None and stage not in self._starting
        )

    @property
    def loading(self) -> tuple[int, ...]:
        """Stages whose worker is still loading weights."""
        return tuple(
            stage
            for stage, holder in enumerate(self._holders)
            if (stage in self._starting if holder is None else not _is_ready(self._here[holder]))
        )

    @property
    def _holders(self) -> list[str | None]:
        return [self._best(stage) for stage in range(self._n_stages)]

    @property
    def _to_assign(self) -> list[int]:
        return [stage for stage in self.missing if stage not in self._claimed]

    @property
    def _takers(self) -> list[str]:
        """Workers that may be assigned a stage. Free workers come first. Then come workers whose
        stage is not used, because another worker has the same stage or because the pipeline has
        another number of stages."""
        holders = self._holders
        free = [address for address, answer in self._here.items() if _is_free(answer)]
        surplus = [
            address
            for address, answer in self._here.items()
            if not _is_free(answer) and not answer.is_fixed and address not in holders
        ]
        return [*sorted(free, key=lambda address: self._n_assigned.get(address, 0)), *surplus]

    def _best(self, stage: int, *, only_ready: bool = False) -> str | None:
        """Returns the address of the best worker of a stage, or None if the stage has none."""
        holders = [
            address
            for address, answer in self._here.items()
            if self._holds_a_stage(answer)
            and answer.stage_index == stage
            and (_is_ready(answer) or not only_ready)
        ]
        return max(holders, key=self._merit, default=None)

    def _merit(self, address: str) -> tuple[bool, bool, int, int]:
        answer = self._here[address]
        return (_is_ready(answer), answer.is_fixed, answer.epoch, self._places[address])

    def _holds_a_stage(self, answer: worker_pb2.DescribeResponse) -> bool:
        return not _is_free(answer) and answer.n_stages == self._n_stages


def _is_free(answer: worker_pb2.DescribeResponse) -> bool:
    return answer.state == worker_pb2.WORKER_STATE_FREE


def _is_ready(answer: worker_pb2.DescribeResponse) -> bool:
    return answer.state == worker_pb2.WORKER_STATE_READY
