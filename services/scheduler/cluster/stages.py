"""The addresses of a pipeline's workers: fixed addresses, or addresses of pods that come and go.

Each worker itself reports which stage it is.
"""

from collections.abc import Sequence
from typing import Protocol


class StageDirectory(Protocol):
    """A directory of the addresses of the workers' controllers."""

    @property
    def n_stages(self) -> int:
        """Number of stages of the pipeline. The number of known workers may differ."""

    def addresses(self) -> Sequence[str]:
        """Returns the `host:port` of every worker that is known now, older ones first."""


class StaticStages:
    """A directory of fixed addresses, one worker for each stage."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)

    @property
    def n_stages(self) -> int:
        """Number of stages, which is the number of addresses."""
        return len(self._addresses)

    def addresses(self) -> Sequence[str]:
        """Returns the given addresses."""
        return list(self._addresses)
