"""Whether the ranks of a stage live.

Each rank gives a heartbeat more often than the stage does, from when its process has begun. The
stage gives its own as long as all its ranks give theirs, and has failed when one of them ends or is
silent for too long.
"""

import asyncio
from collections.abc import Callable

HEARTBEAT_S = 1.0
"""Interval of the stage's heartbeats; ranks give theirs more often."""

LOADING_SILENCE_LIMIT_S = 60.0
"""Seconds without a sign of life after which a rank is lost that has not loaded: while it imports
torch it gives none, and while it reads a large tensor it may give none either."""


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
        # By tp_rank: checks since the last heartbeat, or since the start before the first one.
        self._n_missed = dict.fromkeys(range(tp_size), 0)
        self._heard: set[int] = set()
        self._loaded: set[int] = set()

    @property
    def n_alive(self) -> int:
        """Ranks that give their heartbeats; one may be due between two checks."""
        return sum(self._n_missed[tp_rank] <= 1 for tp_rank in list(self._heard))

    def note_heartbeat(self, tp_rank: int) -> None:
        """Takes a rank's heartbeat."""
        self._heard.add(tp_rank)
        self._n_missed[tp_rank] = 0

    def note_loaded(self, tp_rank: int) -> None:
        """Notes that a rank has its weights, and must not be silent for long from now on."""
        self._loaded.add(tp_rank)

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
        a rank lost that has been silent for the limit, which is longer before it has loaded.

        It counts checks, not seconds: while the controller itself does not run, heartbeats may lie
        unread.
        """
        for tp_rank, n_missed in self._n_missed.items():
            is_loaded = tp_rank in self._loaded
            limit_s = silence_limit_s if is_loaded else LOADING_SILENCE_LIMIT_S
            if n_missed * HEARTBEAT_S >= limit_s:
                self.lose(f"rank {tp_rank} has given no sign of life for {limit_s:g} s")
                return
        if len(self._heard) == self.tp_size and not any(self._n_missed.values()):
            self.n_heartbeats += 1
            self._on_alive()
        for tp_rank in self._n_missed:
            self._n_missed[tp_rank] += 1
