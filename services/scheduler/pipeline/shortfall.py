"""The shortfall: why there is no pipeline, and which workers do not fit. There are two texts of it:
one for operators, with the workers' addresses, and one for clients, with the workers' names
only."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnfitWorker:
    """A worker that stays out of the pipeline because it does not fit."""

    address: str
    name: str
    """The worker's name for people; empty if the worker is too old to have one."""
    says: str
    """The differences between the worker and the other workers, as text: `block_size 16, not
    32`."""

    @property
    def for_operators(self) -> str:
        """The reason why the worker does not fit, with its name and address."""
        return f"{f'{self.name} ' if self.name else ''}at {self.address} does not fit: {self.says}"

    @property
    def for_clients(self) -> str:
        """The reason why the worker does not fit, without its address."""
        return f"{self.name or 'an older worker'} does not fit: {self.says}"


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The stages that a pipeline lacks, and the workers that do not fit. There may be workers that
    do not fit although no stage is missing."""

    loading: Sequence[int] = ()
    """Stages whose worker is still loading weights."""
    missing: Sequence[int] = ()
    """Stages without a worker."""
    unfit: tuple[UnfitWorker, ...] = ()

    @property
    def for_operators(self) -> str:
        """The whole shortfall as text, with the addresses of workers."""
        return self._said([worker.for_operators for worker in self.unfit])

    @property
    def for_clients(self) -> str:
        """The whole shortfall as text, without the addresses of workers."""
        return self._said([worker.for_clients for worker in self.unfit])

    def _said(self, unfit: Sequence[str]) -> str:
        said = []
        if self.loading:
            said.append(f"weights are loaded on stage {_listed(self.loading)}")
        if self.missing:
            said.append(f"there is no worker for stage {_listed(self.missing)}")
        return "; ".join([*said, *unfit])


def log_new(before: Collection[UnfitWorker], now: Collection[UnfitWorker]) -> None:
    """Logs each worker in `now` that is not in `before`: a worker that has become unfit."""
    for worker in now:
        if worker not in before:
            log.warning("worker %s", worker.for_operators)


def _listed(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))
