"""The addresses of the workers: fixed addresses, or addresses of pods that come and go.

Each worker itself reports which stage it is.
"""

from collections.abc import Sequence
from typing import Protocol


class StageDirectory(Protocol):
    """A directory of the addresses of the workers' controllers."""

    @property
    def n_stages(self) -> int:
        """Number of stages of a pipeline. The number of known workers may differ."""

    def addresses(self) -> Sequence[str]:
        """Returns the `host:port` of every worker that is known now, older ones first."""


class WorkerDirectory(StageDirectory, Protocol):
    """A directory that also lists workers that are about to end."""

    def leaving(self) -> Sequence[str]:
        """Returns the `host:port` of every worker that is about to end, older ones first.
        `addresses` does not list these workers."""


class StaticStages:
    """A directory of fixed addresses."""

    def __init__(self, addresses: Sequence[str], n_stages: int | None = None) -> None:
        """`n_stages` is the number of stages of a pipeline. If it is None, all workers are one
        pipeline."""
        self._addresses = list(addresses)
        self._n_stages = n_stages or len(self._addresses)

    @property
    def n_stages(self) -> int:
        """Number of stages of a pipeline."""
        return self._n_stages

    def addresses(self) -> Sequence[str]:
        """Returns the given addresses."""
        return list(self._addresses)

    def leaving(self) -> Sequence[str]:
        """Returns an empty sequence: with fixed addresses, only the worker's own description shows
        that it is about to end."""
        return ()
