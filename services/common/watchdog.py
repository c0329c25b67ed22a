"""Ends a process that hangs. A service hangs if its event loop makes no progress, and a rank hangs
if its main thread makes none.

A thread measures the time without progress by counting its own ticks, and does not read the clock.
If a process is paused, or gets no processor, this thread makes no ticks either, so the process does
not count as hung. A process that hangs writes the stacks of all its threads and ends, so that its
launcher or Kubernetes starts it again, even if no probe checks it.

While a call holds the interpreter lock, this thread does not run either, so it cannot detect a hang
in such a call. Probes and launchers detect such a hang.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

log = logging.getLogger(__name__)

HUNG_STATUS = 70
"""Exit status of a process that has hung (EX_SOFTWARE of sysexits.h)."""

LIMIT_S = 7.0
"""Seconds within which an event loop must make progress.

Together with the time until the watchdog notices a hang, this is less than ten seconds.
"""

TICK_S = 0.5


def end_hung_process(reason: str) -> None:
    """Writes the reason and the stacks of all threads to standard error, and ends the process."""
    log.critical("%s; the stacks of all threads follow", reason)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(HUNG_STATUS)


class Watchdog:
    """A thread that ends the process if its event loop makes no progress for a while: if the task
    `turn` has not run for `limit_s` seconds.

    The thread watches from the time when `turn` first runs to the end of the `with` block.
    """

    def __init__(
        self,
        *,
        limit_s: float = LIMIT_S,
        tick_s: float = TICK_S,
        on_hang: Callable[[str], None] = end_hung_process,
    ) -> None:
        """`on_hang` is called once, in the watchdog's thread, with the reason as text."""
        self._limit_s = limit_s
        self._tick_s = tick_s
        self._on_hang = on_hang
        self._n_turns = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join(self._limit_s)

    async def turn(self) -> None:
        """Increments a counter every `tick_s` seconds, which shows the watchdog's thread that the
        event loop makes progress. Runs until cancelled."""
        while True:
            self._n_turns += 1
            await asyncio.sleep(self._tick_s)

    def _watch(self) -> None:
        n_turns = n_silent = 0
        while not self._is_over.wait(self._tick_s):
            n_silent = n_silent + 1 if n_turns == self._n_turns else 0
            n_turns = self._n_turns
            if n_turns and n_silent * self._tick_s >= self._limit_s:
                self._on_hang(f"the event loop has not turned for {self._limit_s:g} s")
                return


async def watched(main: Coroutine[Any, Any, int], watchdog: Watchdog | None = None) -> int:
    """Runs a coroutine to its end under a watchdog and returns its result."""
    with watchdog or Watchdog() as watchdog:
        turning = asyncio.create_task(watchdog.turn())
        try:
            return await main
        finally:
            turning.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await turning
