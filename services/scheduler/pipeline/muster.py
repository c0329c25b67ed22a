"""The rule by which workers become the stages of a pipeline.

A worker holds one stage, or none yet; the answer to `Describe` says which. A worker that holds a
stage keeps it, since the weights of the stage are in its memory. A stage that no worker holds is
assigned to a free worker. The workers that are left over are spares. Two workers may hold the same
stage, after one of them did not answer for a while: the other worker is a spare that can take over
the stage at once.

This module only decides: `membership.py` asks the workers and carries out the assignments.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from orcinus.v1 import worker_pb2

from services.common.protocol import PROTOCOL

Build = tuple[object, ...]
"""The properties that all stages of a pipeline must have in common: model, fingerprint, tensor
parallel size and block size."""

NO_BUILD: Build = ()


@dataclass(frozen=True, slots=True)
class Muster:
    """The members of a pipeline, or, while the pipeline is incomplete, the assignments that
    complete it."""

    members: tuple[str, ...] = ()
    """Address of one ready worker for each stage, in the order of stages; empty while a stage has
    no ready worker. The workers have different builds only if no assignment can change that."""

    assignments: Mapping[str, int] = field(default_factory=dict)
    """The stage to assign to each worker, by the worker's address."""

    loading: tuple[int, ...] = ()
    """Stages whose worker is still loading weights."""

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

    `answers` are the workers' descriptions by address, older pods first. Stages in `claimed` are
    not assigned, because their worker stopped answering only a moment ago. `n_assigned` is the
    number of earlier assignments to each worker. Free workers with fewer assignments come first,
    since a worker that cannot load its weights becomes free again and again.
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
    """The answers of the workers, and the choice among workers of one stage. A ready worker is
    better than a worker that loads; then a worker whose stage is fixed is better; then a worker
    that has seen a newer epoch; then a newer pod."""

    def __init__(self, answers: Mapping[str, worker_pb2.DescribeResponse], n_stages: int) -> None:
        self._answers = answers
        self._n_stages = n_stages
        self._ours = {  # workers with this scheduler's version of the protocol
            address: answer for address, answer in answers.items() if answer.protocol == PROTOCOL
        }

    def best_build(self) -> Build:
        """Returns the build that has workers for most stages. A build with a ready worker for every
        stage comes first. Among equal builds, the build of the newest pod is returned."""
        builds = [_build_of(self._ours[it]) for it in self._holders() if self._is_ready(it)]

        def rank(place: int) -> tuple[int, int, int]:
            stages = range(self._n_stages)
            ready = [self.best(stage, builds[place], only_ready=True) for stage in stages]
            held = [self.best(stage, builds[place]) for stage in stages]
            n_missing = held.count(None)
            return (int(None not in ready), -n_missing, place)

        return builds[max(range(len(builds)), key=rank)] if builds else NO_BUILD

    def best(self, stage: int, build: Build, *, only_ready: bool = False) -> str | None:
        """Returns the address of the best worker that holds a stage and has the build, or None.
        Unless `only_ready`, a worker that still loads counts, too: it may have the build."""
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
        """Returns the address of the best loaded worker that holds a stage, whatever its build and
        protocol; None if there is none."""
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
        """Returns workers that may get another stage. Their stage is not used, because another
        worker holds it or because the pipeline has another number of stages. A ready worker of
        another build is returned only in the second case: with another stage it would still have
        the other build."""
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
