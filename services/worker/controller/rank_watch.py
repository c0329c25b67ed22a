"""Whether the ranks of a stage live.

Each rank gives a heartbeat more often than the stage does. The stage gives its own as long as all
its ranks give theirs, and has failed when one of them ends or is silent for too long.
"""

import asyncio
from collections.abc import Callable

HEARTBEAT_S = 1.0
"""Interval of the stage's heartbeats; ranks give theirs more often."""


class RankWatch:
    """The heartbeats of a stage's ranks, and the loss of one."""

    def __init__(
        self, tp_size: int, *, on_alive: Callable[[], None], on_lost: Callable[[str], None]
    ) -> None:
        """`on_alive` is called for each heartbeat of the stage, and `on_lost` once, with the
        reason, when a rank is lost."""
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when a rank is lost and the stage cannot go on."""
        self.tp_size = tp_size
        self.n_heartbeats = 0
        """Heartbeats that the stage has given."""
        self._on_alive = on_alive
        self._on_lost = on_lost
        self._n_missed: dict[int, int] = {}  # checks since the last heartbeat, by tp_rank

    @property
    def n_alive(self) -> int:
        """Ranks that give their heartbeats; one may be due between two checks."""
        return sum(n_missed <= 1 for n_missed in list(self._n_missed.values()))

    def note_heartbeat(self, tp_rank: int) -> None:
        """Takes a rank's heartbeat; a rank gives its first when it has loaded."""
        self._n_missed[tp_rank] = 0

    def lose(self, reason: str) -> None:
        """Declares the stage failed, unless it is already."""
        if not self.failure.done():
            self.failure.set_result(reason)
            self._on_lost(reason)

    async def watch(self, silence_limit_s: float) -> None:
        """Checks the ranks every HEARTBEAT_S until one is lost."""
        while not self.failure.done():
            await asyncio.sleep(HEARTBEAT_S)
            self.check(silence_limit_s)

    def check(self, silence_limit_s: float) -> None:
        """Gives a heartbeat of the stage if every rank has given one since the last check; declares
        a rank lost that has been silent for the limit.

        It counts checks, not seconds: while the controller itself does not run, heartbeats may lie
        unread.
        """
        for tp_rank, n_missed in self._n_missed.items():
            if n_missed * HEARTBEAT_S >= silence_limit_s:
                self.lose(f"rank {tp_rank} has given no sign of life for {silence_limit_s:g} s")
                return
        if len(self._n_missed) == self.tp_size and not any(self._n_missed.values()):
            self.n_heartbeats += 1
            self._on_alive()
        for tp_rank in self._n_missed:
            self._n_missed[tp_rank] += 1
