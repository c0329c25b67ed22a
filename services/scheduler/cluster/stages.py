"""The addresses of a pipeline's workers: fixed ones, or the addresses of pods that come and go.

The workers themselves say which stage each of them is.
"""

from collections.abc import Sequence
from typing import Protocol


class StageDirectory(Protocol):
    """A directory of the workers' controllers."""

    @property
    def n_stages(self) -> int:
        """Number of stages of the pipeline; there may be more workers, or fewer."""

    def addresses(self) -> Sequence[str]:
        """Returns the `host:port` of every worker that is known now, older ones first."""


class StaticStages:
    """Workers at addresses that were given, one for each stage."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)

    @property
    def n_stages(self) -> int:
        """The number of addresses."""
        return len(self._addresses)

    def addresses(self) -> Sequence[str]:
        """Returns the given addresses."""
        return list(self._addresses)
