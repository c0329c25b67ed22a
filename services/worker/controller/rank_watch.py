"""Watches the heartbeats of a stage's ranks, and sends the heartbeats of the stage.

Each rank sends heartbeats as soon as it knows its stage, more often than the stage does. The stage
has failed when a rank ends or is silent for too long. Until then the stage sends heartbeats. They
mean that the controller of the stage runs and that no rank counts as lost.
"""

import asyncio
import itertools
from collections.abc import Callable

CHECK_S = 0.25
"""Seconds between two checks of the ranks."""

HEARTBEAT_S = 0.5
"""Seconds between two heartbeats of the stage."""

RECENTLY_S = 1.0
"""Seconds after its last heartbeat for which a rank counts as alive."""

LOADING_SILENCE_LIMIT_S = 60.0
"""Seconds without a heartbeat after which a rank that has not loaded counts as lost. A rank sends
no heartbeat while it imports torch, and possibly none while it reads a large tensor."""


class RankWatch:
    """Tracks the heartbeats of a stage's ranks, and detects the loss of a rank."""

    def __init__(
        self, tp_size: int, *, on_alive: Callable[[], None], on_lost: Callable[[str, bool], None]
    ) -> None:
        """`on_alive` is called for each heartbeat of the stage. `on_lost` is called once, when a
        rank is lost. Its arguments are the reason, and whether the rank failed by itself (without
        being stopped or killed from outside)."""
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """A future that is done when a rank is lost and the stage fails. Its result is the
        reason."""
        self.tp_size = tp_size
        self.n_heartbeats = 0
        """Number of heartbeats that the stage has sent."""
        self._on_alive = on_alive
        self._on_lost = on_lost
        # By tp_rank: number of checks since the rank's last heartbeat, or since the start.
        self._n_missed = dict.fromkeys(range(tp_size), 0)
        self._heard: set[int] = set()
        self._loaded: set[int] = set()

    @property
    def n_alive(self) -> int:
        """Number of ranks that have sent a heartbeat recently."""
        return sum(self._n_missed[tp_rank] * CHECK_S <= RECENTLY_S for tp_rank in list(self._heard))

    def note_heartbeat(self, tp_rank: int) -> None:
        """Handles a heartbeat of a rank."""
        self._heard.add(tp_rank)
        self._n_missed[tp_rank] = 0

    def note_loaded(self, tp_rank: int) -> None:
        """Records that a rank has loaded its weights. From then on, the shorter silence limit
        applies to the rank."""
        self._loaded.add(tp_rank)

    def lose(self, reason: str, *, is_by_itself: bool = False) -> None:
        """Declares the stage failed, unless it has failed already. `is_by_itself` means that a rank
        failed without being stopped or killed from outside."""
        if not self.failure.done():
            self.failure.set_result(reason)
            self._on_lost(reason, is_by_itself)

    async def watch(self, silence_limit_s: float) -> None:
        """Checks the ranks every CHECK_S seconds, and sends a heartbeat of the stage every
        HEARTBEAT_S seconds, until a rank is lost."""
        n_checks_each = round(HEARTBEAT_S / CHECK_S)
        for number in itertools.count(1):
            await asyncio.sleep(CHECK_S)
            self.check(silence_limit_s)
            if self.failure.done():
                return
            if number % n_checks_each == 0:
                self.beat()

    def check(self, silence_limit_s: float) -> None:
        """Declares a rank lost if it has been silent for too long.

        The limit is `silence_limit_s`, or LOADING_SILENCE_LIMIT_S until the rank has loaded.
        Silence is measured in checks and not by the clock, because heartbeats stay unread while the
        controller itself does not run.
        """
        for tp_rank, n_missed in self._n_missed.items():
            is_loaded = tp_rank in self._loaded
            limit_s = silence_limit_s if is_loaded else LOADING_SILENCE_LIMIT_S
            if n_missed * CHECK_S >= limit_s:
                self.lose(f"rank {tp_rank} has given no sign of life for {limit_s:g} s")
                return
        for tp_rank in self._n_missed:
            self._n_missed[tp_rank] += 1

    def beat(self) -> None:
        """Sends a heartbeat of the stage, if every rank has sent a heartbeat since the rank
        started."""
        if len(self._heard) == self.tp_size:
            self.n_heartbeats += 1
            self._on_alive()
