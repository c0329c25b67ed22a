"""Where the stages of the pipeline are: fixed addresses, or pods that come and go."""

from collections.abc import Sequence
from typing import Protocol


class StageDirectory(Protocol):
    """Who knows where the stages' controllers are."""

    async def addresses(self) -> list[str]:
        """One `host:port` for each stage, in order; waits until there is one for each."""

    @property
    def missing(self) -> list[int]:
        """Stages that nothing is known of."""


class StaticStages:
    """Stages at addresses that were given."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)

    async def addresses(self) -> list[str]:
        """The addresses."""
        return list(self._addresses)

    @property
    def missing(self) -> list[int]:
        """None: whether anybody is there, an address does not say."""
        return []
