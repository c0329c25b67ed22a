"""The rule by which workers become the stages of pipelines.

A worker holds one stage, or none yet; the answer to `Describe` says which. Workers whose traits are
equal form a group, and a pipeline is made of one group. The first of these groups is chosen:

1. a group with a ready worker for every stage;
2. a group that has enough workers for every stage, although some are not ready yet;
3. among those, the group that holds the most stages, or held them until a moment ago, then the
   largest group, then the group of the newest pod.

While pipelines serve, only groups with the same model are considered, because requests move from
one pipeline to another. Groups of several builds of this model may form pipelines side by side.

In the group that is chosen, a worker that holds a stage keeps it, because the weights of the stage
are in its memory. A stage that no worker holds is assigned to a free worker. Workers beyond the
first pipeline get the stages of further pipelines, as many as can be completed. The workers that
are left over are spares. A spare may still hold a stage, for example because it was replaced while
it did not answer; it can take over this stage at once. If a stage is missing and there are too few
free workers, a worker whose stage is not needed is recalled: it ends, and starts again without a
stage. `surplus.py` has the rule by which a spare is recalled while no stage is missing.

The workers may include those of a pipeline that drains. Such a worker keeps its stage: if the other
stages have ready workers, the new pipeline takes it over.

Workers of other groups stay as they are. If no group has enough workers, each group loads what it
can, so that the first group that becomes large enough loses no time, whichever worker came first.

This module only decides: `membership.py` asks the workers and carries out the assignments.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from orcinus.v1 import worker_pb2

from services.scheduler.pipeline.fit import Traits, differences, fault_of, model_of, traits_of


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
    is_serving: bool = False
    """Whether the worker is in a pipeline that drains. Such a worker keeps its stage."""

    is_leaving: bool = False
    """Whether the worker is about to end."""


@dataclass(frozen=True, slots=True)
class Muster:
    """The result of `muster`: the members of a pipeline if one is complete, and the stages to
    assign to workers for further pipelines."""

    members: tuple[str, ...] = ()
    """Address of one ready worker for each stage, in the order of the stages; empty if a stage has
    no ready worker."""

    assignments: Mapping[str, int] = field(default_factory=dict)
    """The stage to assign to each worker, by the worker's address."""

    loading: tuple[int, ...] = ()
    """Stages whose worker is still loading weights."""

    missing: tuple[int, ...] = ()
    """Stages without a worker."""

    can_complete: bool = False
    """Whether there are enough workers for a pipeline."""

    unfit: Mapping[str, str] = field(default_factory=dict)
    """The workers that stay out of the pipeline because they do not fit: the reason why, by the
    worker's address. If no group has enough workers and there are several groups, the workers of
    all groups are listed."""


def muster(
    offers: Sequence[Offer],
    n_stages: int,
    *,
    n_pipelines: int = 1,
    n_assigned: Mapping[str, int] | None = None,
    serving: Collection[Traits] = (),
    taken: Collection[str] = (),
) -> Muster:
    """Returns the members of a pipeline, or the assignments that lead to one.

    `offers` are the workers that are in no pipeline, or in a pipeline that drains, older pods
    first. `n_pipelines` is the largest number of pipelines to make of them. Beyond the first,
    stages are assigned only for pipelines that can be completed. `n_assigned` is the number of
    earlier assignments to each worker. Free workers with fewer assignments come first, because a
    worker that cannot load its weights becomes free again and again. `serving` are the traits of
    the workers in the pipelines that serve already; workers of another model stay out. `taken` are
    the names of the processes of workers that stay in their pipelines: a worker that has a second
    address is found by its process, and not used twice.
    """
    faults = faults_of(offers, n_stages, taken)
    sound = [offer for offer in offers if offer.address not in faults]
    starting = Counter(
        offer.answer.stage_index
        for offer in sound
        if offer.answer.state == worker_pb2.WORKER_STATE_LOADING and not traits_of(offer.answer)
    )
    kinds: dict[Traits, list[Offer]] = {traits: [] for traits in serving}
    models = set(map(model_of, serving))
    for offer in sound:
        if (traits := traits_of(offer.answer)) and (not models or model_of(traits) in models):
            kinds.setdefault(traits, []).append(offer)
    if not kinds:
        kinds = {(): []}
    places = {offer.address: place for place, offer in enumerate(offers)}
    groups = {
        traits: _Group(
            members, n_stages, n_pipelines, starting, places=places, n_assigned=n_assigned or {}
        )
        for traits, members in kinds.items()
    }
    chosen = max(groups, key=lambda traits: groups[traits].rank)
    best = groups[chosen]
    assigning = [best] if best.can_complete else list(groups.values())
    fitting = set(serving)
    if best.can_complete:
        fitting.add(chosen)
    if serving:
        fitting |= {traits for traits, group in groups.items() if group.can_complete}
    return Muster(
        members=best.members,
        assignments={k: v for group in assigning for k, v in group.assignments.items()},
        loading=best.loading,
        missing=best.missing,
        can_complete=best.can_complete,
        unfit=_unfit(offers, faults, fitting),
    )


def unfit_beside(
    offers: Sequence[Offer],
    serving: Collection[Traits],
    n_stages: int,
    *,
    taken: Collection[str] = (),
) -> dict[str, str]:
    """Returns the workers that no pipeline can use: the reason why, by the worker's address.

    A worker with a fault (`faults_of`) is unfit. A worker without a fault is unfit if no pipeline
    that serves has its traits, and workers with its traits cannot form a pipeline of another build,
    because they are too few or have another model; the reason says how its traits differ. Workers
    that do not answer are left out, and so are workers without a fault whose traits are not known
    yet.

    `offers` are the workers that are in no pipeline. `serving` are the traits of the workers in
    pipelines, and `taken` the names of the processes of these workers.
    """
    faults, models = faults_of(offers, n_stages, taken), set(map(model_of, serving))
    counts = Counter(traits_of(it.answer) for it in offers if it.address not in faults)
    builds = {
        traits for traits, n in counts.items() if n >= n_stages and model_of(traits) in models
    }
    return _unfit(offers, faults, builds.union(serving))


def faults_of(offers: Sequence[Offer], n_stages: int, taken: Collection[str]) -> dict[str, str]:
    """Returns the reason, by the worker's address, for each worker that can be in no pipeline of
    `n_stages` stages. One reason is that the worker's process is in `taken`, or has been met at
    another address before."""
    faults, processes = {}, set(taken)
    for offer in offers:
        answer = offer.answer
        if fault := fault_of(answer, n_stages):
            faults[offer.address] = fault
        elif answer.process and offer.presence is Presence.HERE:
            if answer.process in processes:
                faults[offer.address] = "it is known by another address, too"
            processes.add(answer.process)
    return faults


def _unfit(
    offers: Sequence[Offer], faults: Mapping[str, str], fitting: Collection[Traits]
) -> dict[str, str]:
    """Returns the workers that answer and do not fit: the reason why, by the worker's address.
    `faults` has the reasons of workers with faults. For any other worker, the reason is how its
    traits differ from the `fitting` ones. Workers without a fault whose traits are not known yet
    are left out."""
    here = [offer for offer in offers if offer.presence is Presence.HERE]
    faulty = {offer.address: faults[offer.address] for offer in here if offer.address in faults}
    traits = {
        offer.address: traits_of(offer.answer)
        for offer in here
        if offer.address not in faults and offer.answer.traits
    }
    return faulty | differences(traits, fitting)


class _Group:
    """Workers with equal traits: decides which of them become members, and which get a stage.

    Of the workers that hold one stage, the best is chosen. A ready worker is better than a worker
    that still loads. Among equals, a worker that is leaving is worse. Then a worker that has to
    keep its stage is better, then a worker that has seen a newer epoch, and then a newer pod.
    """

    def __init__(
        self,
        offers: Sequence[Offer],
        n_stages: int,
        max_pipelines: int,
        starting: Mapping[int, int],
        *,
        places: Mapping[str, int],
        n_assigned: Mapping[str, int],
    ) -> None:
        """`starting` counts, for each stage, the workers whose traits are not known yet and whose
        settings name this stage. `places` has a number for each worker, which is higher for newer
        pods."""
        self._starting = starting
        self._places = places
        self._size = len(offers)
        self._newest = max((places[offer.address] for offer in offers), default=-1)
        self._here = {it.address: it.answer for it in offers if it.presence is Presence.HERE}
        self._leaving = {it.address for it in offers if it.is_leaving}
        self._kept = {it.address for it in offers if it.is_serving or it.answer.is_fixed}
        ended = {
            it.address for it in offers if it.presence is Presence.ENDED and not it.answer.is_fixed
        }
        self._n_ended = len(ended)
        held = {
            it.address: it.answer
            for it in offers
            if not _is_free(it.answer)
            and it.answer.n_stages == n_stages
            and it.answer.stage_index < n_stages
        }
        self._claims = Counter(starting) + Counter(
            answer.stage_index
            for address, answer in held.items()
            if address not in self._here and address not in ended
        )
        self._holders: list[list[str]] = [[] for _ in range(n_stages)]  # the best come first
        for address in sorted(held.keys() & self._here.keys(), key=self._merit, reverse=True):
            self._holders[held[address].stage_index].append(address)
        self._useless = [
            address
            for address, answer in self._here.items()
            if not (_is_free(answer) or address in self._kept or address in held)
        ]
        free = [address for address, answer in self._here.items() if _is_free(answer)]
        self._free = sorted(free, key=lambda address: n_assigned.get(address, 0))
        most = min(max_pipelines, (self._size + sum(starting.values())) // n_stages)
        self._n_pipelines = next((n for n in range(most, 1, -1) if self._can_complete(n)), 1)

    @property
    def rank(self) -> tuple[bool, bool, int, int, int]:
        """The group's rank. The group with the highest rank is chosen."""
        n_held = len(self._holders) - max(0, len(self._to_assign(1)) - self._n_ended)
        return (bool(self.members), self.can_complete, n_held, self._size, self._newest)

    @property
    def members(self) -> tuple[str, ...]:
        """Ready workers of all stages, in the order of the stages. Empty if a stage has no ready
        worker."""
        best = [holders[0] for holders in self._holders if holders and self._is_ready(holders[0])]
        return tuple(best) if len(best) == len(self._holders) else ()

    @property
    def can_complete(self) -> bool:
        """Whether there are enough workers for all stages. A process that starts again counts."""
        return self._can_complete(1)

    @property
    def assignments(self) -> dict[str, int]:
        """The stage to assign to each worker. Workers are recalled from a stage only if the free
        workers, and the processes that start again, are too few."""
        stages = self._to_assign(self._n_pipelines)
        n_recalled = max(0, len(stages) - len(self._free) - self._n_ended)
        takers = [*self._free, *self._surplus(self._n_pipelines)[:n_recalled]]
        return dict(zip(takers, stages, strict=False))

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages whose worker does not answer, or that no worker holds."""
        return tuple(
            stage
            for stage, holders in enumerate(self._holders)
            if not holders and not self._starting.get(stage)
        )

    @property
    def loading(self) -> tuple[int, ...]:
        """Stages whose worker is still loading weights."""
        return tuple(
            stage
            for stage, holders in enumerate(self._holders)
            if (not self._is_ready(holders[0]) if holders else self._starting.get(stage))
        )

    def _can_complete(self, n_pipelines: int) -> bool:
        n_takers = len(self._free) + self._n_ended + len(self._surplus(n_pipelines))
        return n_takers >= len(self._to_assign(n_pipelines))

    def _to_assign(self, n_pipelines: int) -> list[int]:
        """Returns the stages that no worker holds, once for each pipeline that lacks the stage. All
        stages of one pipeline come before the stages of the next pipeline."""
        n_held = [len(holders) + self._claims[stage] for stage, holders in enumerate(self._holders)]
        return [
            stage for number in range(n_pipelines) for stage, n in enumerate(n_held) if n <= number
        ]

    def _surplus(self, n_pipelines: int) -> list[str]:
        """Returns the workers whose stage is not needed, because enough other workers hold it, or
        because it is a stage of pipelines with another number of stages. The least suitable come
        first."""
        beyond = [address for holders in self._holders for address in holders[n_pipelines:]]
        movable = [address for address in beyond if address not in self._kept]
        return [*self._useless, *sorted(movable, key=self._merit)]

    def _is_ready(self, address: str) -> bool:
        return self._here[address].state == worker_pb2.WORKER_STATE_READY

    def _merit(self, address: str) -> tuple[bool, bool, bool, int, int]:
        answer = self._here[address]
        is_kept = address in self._kept
        stays, place = address not in self._leaving, self._places[address]
        return (self._is_ready(address), stays, is_kept, answer.epoch, place)


def _is_free(answer: worker_pb2.DescribeResponse) -> bool:
    return answer.state == worker_pb2.WORKER_STATE_FREE
