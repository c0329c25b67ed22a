"""The workers from which the next pipeline may be formed.

These are the workers that are in no pipeline. If all pipelines drain, the members of these
pipelines that are not leaving are added: together with replacements for the leaving ones they can
make the next pipeline, which then takes over these members.

A new leader may find only workers that are leaving, for example while a rollout replaces schedulers
and workers at the same time. Until the first pipeline of this leader serves, such workers may form
one pipeline, which drains from the beginning.
"""

from collections.abc import Collection, Sequence
from itertools import count

from services.scheduler.cluster.stages import WorkerDirectory
from services.scheduler.pipeline.fit import Traits, model_of, traits_of
from services.scheduler.pipeline.membership import Member, Pipeline


class FreeWorkers:
    """Keeps the pipelines that have been formed, and lists the workers for the next one."""

    def __init__(self, stages: WorkerDirectory) -> None:
        self._stages = stages
        self._taken: dict[int, Pipeline] = {}
        self._leaving: dict[int, frozenset[str]] = {}  # addresses, by pipelines that drain
        self._has_served = False

    @property
    def n_stages(self) -> int:
        """Number of stages of a pipeline."""
        return self._stages.n_stages

    @property
    def n_staying(self) -> int:
        """Number of pipelines that have been formed, have not ended and do not drain."""
        return len(self._taken) - len(self._leaving)

    @property
    def are_taken(self) -> bool:
        """Whether any pipeline has been formed and has not ended."""
        return bool(self._taken)

    @property
    def n_free(self) -> int:
        """Number of workers that are in no pipeline."""
        return len(self._free())

    def addresses(self) -> Sequence[str]:
        """Returns the addresses of the workers from which the next pipeline may be formed, older
        ones first: workers that are in no pipeline and, if all pipelines drain, the members of
        these pipelines that are not leaving. Workers that are leaving come last, if
        `may_use_leaving` is true."""
        free = set(self._free())
        yielding = set() if self.n_staying else self._yielding()
        offered = [it for it in self._stages.addresses() if it in free or it in yielding]
        return [*offered, *self._stages.leaving()] if self.may_use_leaving() else offered

    def may_use_leaving(self) -> bool:
        """Returns whether workers that are leaving may form a pipeline, if there are too few
        others."""
        return not (self._has_served or self._taken)

    def is_terminating(self, address: str) -> bool:
        """Returns whether the worker at an address is about to end according to the directory,
        whatever the worker itself reports."""
        return address in self._stages.leaving()

    def is_serving(self, address: str) -> bool:
        """Returns whether the worker at an address is in a pipeline."""
        return any(address in _addresses(pipeline) for pipeline in self._taken.values())

    def traits(self) -> Collection[Traits]:
        """Returns the traits (`fit.py`) of the workers in pipelines, once for each build. If all of
        these workers are leaving, workers of another model may take over, so the result is
        empty."""
        if all(_addresses(self._taken[it]) <= self._leaving.get(it, set()) for it in self._taken):
            return set()
        return {traits_of(pipeline.first) for pipeline in self._taken.values()}

    def processes(self) -> list[str]:
        """Returns the names of the processes of the workers that are in pipelines and cannot be
        used for the next pipeline."""
        offered = set(self.addresses())
        return [
            member.description.process
            for pipeline in self._taken.values()
            for member in pipeline.members
            if member.address not in offered
        ]

    @property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines that have been formed and have not ended."""
        return list(self._taken.values())

    @property
    def draining(self) -> list[Pipeline]:
        """The pipelines that drain and have not ended."""
        return [self._taken[number] for number in self._leaving]

    def next_number(self) -> int:
        """Returns the smallest number that no pipeline has."""
        return next(number for number in count() if number not in self._taken)

    def take(self, pipeline: Pipeline) -> None:
        """Removes the members of a new pipeline from the free workers. If some of them are leaving,
        the pipeline drains from the beginning."""
        self._taken[pipeline.number] = pipeline
        leaving = [
            member.address
            for member in pipeline.members
            if member.description.is_leaving or self.is_terminating(member.address)
        ]
        if leaving:
            self.drain(pipeline, leaving)

    def note_serving(self) -> None:
        """Notes that a pipeline serves. From now on, workers that are leaving form no pipeline."""
        self._has_served = True

    def drain(self, pipeline: Pipeline, leaving: Collection[str]) -> None:
        """Notes that a pipeline drains because its workers at the addresses `leaving` are about to
        end."""
        self._leaving[pipeline.number] = frozenset(leaving)

    def give_back(self, pipeline: Pipeline) -> None:
        """Makes the members of a pipeline that has ended free again, unless they are free
        already."""
        if self._taken.get(pipeline.number) is pipeline:
            del self._taken[pipeline.number]
            self._leaving.pop(pipeline.number, None)

    def replaced_by(self, members: Sequence[Member]) -> list[Pipeline]:
        """Returns the pipelines that must end before a pipeline of `members` serves: pipelines that
        have some of these members, and pipelines of another model."""
        wanted = {member.address for member in members}
        model = model_of(traits_of(members[0].description))
        return [
            it
            for it in self._taken.values()
            if not wanted.isdisjoint(_addresses(it)) or model_of(traits_of(it.first)) != model
        ]

    def _free(self) -> list[str]:
        return [it for it in self._stages.addresses() if not self.is_serving(it)]

    def _yielding(self) -> set[str]:
        """Returns the addresses of workers that are not leaving and whose pipeline drains."""
        return {
            address
            for number, leaving in self._leaving.items()
            for address in _addresses(self._taken[number]) - leaving
        }


def _addresses(pipeline: Pipeline) -> set[str]:
    return {member.address for member in pipeline.members}
