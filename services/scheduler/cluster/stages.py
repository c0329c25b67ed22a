"""The addresses of the pipeline's stages: fixed ones, or those of pods that come and go."""

from collections.abc import Sequence
from typing import Protocol


class StageDirectory(Protocol):
    """A directory of the stages' controllers."""

    async def addresses(self) -> list[str]:
        """Returns one `host:port` for each stage, in order; waits until there is one for each."""

    @property
    def missing(self) -> list[int]:
        """Stages without a known address."""


class StaticStages:
    """Stages at addresses that were given."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)

    async def addresses(self) -> list[str]:
        """Returns the given addresses."""
        return list(self._addresses)

    @property
    def missing(self) -> list[int]:
        """Always none: an address does not say whether anybody is there."""
        return []
