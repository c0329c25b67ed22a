"""The rule by which workers become the stages of a pipeline.

A worker is one stage or none yet (`Describe`). Workers that hold a stage keep it, since they have
its weights in memory; a stage that no worker holds is assigned to a free worker, and the workers
that are left over are spares. Two workers may hold the same stage, after one of them was silent for
a while: the other is a spare that takes that stage over at once.

The rule decides and does nothing: `membership` asks the workers and carries out the assignments.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from orcinus.v1 import worker_pb2

from services.common.protocol import PROTOCOL

Build = tuple[object, ...]
"""Everything that all stages of a pipeline must have in common."""

NO_BUILD: Build = ()


@dataclass(frozen=True, slots=True)
class Muster:
    """The workers of a pipeline as far as they are known, and the assignments that complete it."""

    members: tuple[str, ...] = ()
    """Address of one ready worker for each stage, in order; empty while a stage has none. The
    workers are of different builds only where no assignment can change that."""

    assignments: Mapping[str, int] = field(default_factory=dict)
    """Stages to assign, by the workers' addresses."""

    loading: tuple[int, ...] = ()
    """Stages whose worker loads the weights."""

    missing: tuple[int, ...] = ()
    """Stages without a worker."""


def muster(
    answers: Mapping[str, worker_pb2.DescribeResponse],
    n_stages: int,
    *,
    claimed: Collection[int] = (),
    n_assigned: Mapping[str, int] | None = None,
) -> Muster:
    """Returns the members of a pipeline, or the assignments that lead to one.

    `answers` are the workers' descriptions by address, older pods first. Stages that are `claimed`
    are not assigned, because their worker fell silent only a moment ago. `n_assigned` counts the
    assignments that workers were given before: among free ones those with fewer come first, since
    one that cannot load comes back free again and again.
    """
    workers = _Workers(answers, n_stages)
    build = workers.best_build()
    ready = [workers.best(stage, build, only_ready=True) for stage in range(n_stages)]
    if all(ready):
        return Muster(tuple(filter(None, ready)))
    holders = [workers.best(stage, build) for stage in range(n_stages)]
    missing = tuple(stage for stage, holder in enumerate(holders) if holder is None)
    to_assign = [stage for stage in missing if stage not in claimed]
    counts = n_assigned or {}
    free = sorted(workers.free(), key=lambda address: counts.get(address, 0))
    takers = [*free, *workers.surplus(build, holders)]
    assignments = dict(zip(takers, to_assign, strict=False))
    if missing and not assignments and not claimed:
        of_any_build = [workers.best_of_any_build(stage) for stage in range(n_stages)]
        if all(of_any_build):
            return Muster(tuple(filter(None, of_any_build)), missing=missing)
    loading = tuple(
        stage for stage in range(n_stages) if holders[stage] is not None and ready[stage] is None
    )
    return Muster(assignments=assignments, loading=loading, missing=missing)


class _Workers:
    """The answers of the workers. `best` of several prefers a worker that is ready to one that
    loads, then one that can be no other stage, then the one of the newest epoch, then the newest
    pod."""

    def __init__(self, answers: Mapping[str, worker_pb2.DescribeResponse], n_stages: int) -> None:
        self._answers = answers
        self._n_stages = n_stages
        self._ours = {  # workers that speak our protocol
            address: answer for address, answer in answers.items() if answer.protocol == PROTOCOL
        }

    def best_build(self) -> Build:
        """Returns the build that has most of the stages; of two, that of the newest pod."""
        builds = [_build_of(self._ours[it]) for it in self._holders() if self._is_ready(it)]

        def rank(place: int) -> tuple[int, int, int]:
            stages = range(self._n_stages)
            ready = [self.best(stage, builds[place], only_ready=True) for stage in stages]
            held = [self.best(stage, builds[place]) for stage in stages]
            n_missing = held.count(None)
            return (int(None not in ready), -n_missing, place)

        return builds[max(range(len(builds)), key=rank)] if builds else NO_BUILD

    def best(self, stage: int, build: Build, *, only_ready: bool = False) -> str | None:
        """Returns the best holder of a stage with the build, or one that loads and may have it."""
        holders = [
            address
            for address in self._holders()
            if self._ours[address].stage_index == stage
            and (
                _build_of(self._ours[address]) == build
                if self._is_ready(address)
                else not only_ready
            )
        ]
        return max(holders, key=self._rank, default=None)

    def best_of_any_build(self, stage: int) -> str | None:
        """Returns the best worker that calls itself that stage, whatever its build and protocol."""
        holders = [
            address
            for address, answer in self._answers.items()
            if answer.stage_index == stage
            and answer.state not in (worker_pb2.WORKER_STATE_FREE, worker_pb2.WORKER_STATE_LOADING)
        ]
        return max(holders, key=self._rank, default=None)

    def free(self) -> list[str]:
        """Returns the workers without a stage."""
        return [
            address
            for address, answer in self._ours.items()
            if answer.state == worker_pb2.WORKER_STATE_FREE
        ]

    def surplus(self, build: Build, holders: Collection[str | None]) -> list[str]:
        """Returns workers whose stage is of no use, because another worker holds it or the pipeline
        has another number of stages. Workers of another build stay as they are: their stage would
        be of that build again."""
        return [
            address
            for address, answer in self._ours.items()
            if answer.state != worker_pb2.WORKER_STATE_FREE
            and not answer.is_fixed
            and address not in holders
            and (
                answer.n_stages != self._n_stages
                or not self._is_ready(address)
                or _build_of(answer) == build
            )
        ]

    def _holders(self) -> list[str]:
        return [
            address
            for address, answer in self._ours.items()
            if answer.state != worker_pb2.WORKER_STATE_FREE and answer.n_stages == self._n_stages
        ]

    def _is_ready(self, address: str) -> bool:
        return self._answers[address].state == worker_pb2.WORKER_STATE_READY

    def _rank(self, address: str) -> tuple[bool, bool, int, int]:
        answer, place = self._answers[address], list(self._answers).index(address)
        return (self._is_ready(address), answer.is_fixed, answer.epoch, place)


def _build_of(answer: worker_pb2.DescribeResponse) -> Build:
    return (answer.model, answer.fingerprint, answer.tp_size, answer.block_size)
