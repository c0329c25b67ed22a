"""Keeps a service running: starts a new child process when the present one dies or hangs.

The new child gets the addresses of its predecessor, because the other services know these
addresses.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from services.local.child import Child, OnMessage

MAX_RESTARTS = 5
"""Largest number of restarts of one service within `WINDOW_S` seconds. After that the service is
not restarted."""
WINDOW_S = 60.0
FIRST_PAUSE_S = 0.5
"""Seconds of pause before the second restart within `WINDOW_S` seconds.

The first restart has no pause. The pause before each later restart is twice the previous one.
"""
ADDRESS_OPTIONS = {
    "address": "address",
    "http": "http-address",
    "grpc": "grpc-address",
    "metrics": "metrics-address",
}
"""Names of the command-line options that set addresses, by the key under which a service reports
the address."""


class RestartLimit:
    """Counts the restarts of one service, and determines the pause before each restart."""

    def __init__(self, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._first_pause_s = first_pause_s
        self._times_s: list[float] = []

    @property
    def n_restarts(self) -> int:
        """Number of earlier restarts that count towards the limit at present."""
        return len(self._times_s)

    def pause_s(self, now_s: float, *, was_ready: bool) -> float | None:
        """Counts one more restart, and returns the seconds to pause before it.

        Returns None if the limit of `MAX_RESTARTS` has been reached. A restart counts towards the
        limit for `WINDOW_S` seconds, and longer if the service has not become ready since.
        `was_ready` says whether the child that has ended was ready.
        """
        if was_ready:
            self._times_s = [time_s for time_s in self._times_s if now_s - time_s < WINDOW_S]
        n_before = len(self._times_s)
        if n_before == MAX_RESTARTS:
            return None
        self._times_s.append(now_s)
        return self._first_pause_s * 2.0 ** (n_before - 1) if n_before else 0.0


class Supervisor:
    """Runs one service as a child process, and starts a new child when the present one ends."""

    def __init__(
        self,
        name: str,
        module: str,
        options: Mapping[str, object],
        *,
        ready_key: str,
        on_message: OnMessage,
        tell: Callable[[str], None],
        give_up: Callable[[str], None],
        limit: RestartLimit,
    ) -> None:
        self.child: Child
        self.restarts = False
        """Whether a new child is started when the present child ends.

        The launcher sets this once the whole pipeline serves. A child that ends earlier would fail
        to start again.
        """
        self._name = name
        self._module = module
        self._options = dict(options)
        self._ready_key = ready_key
        self._on_message = on_message
        self._tell = tell
        self._give_up = give_up
        self._limit = limit
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None]

    async def start(self) -> Child:
        """Starts the first child. From now on, a child that ends is replaced."""
        await self._start_child()
        self._task = asyncio.create_task(self._keep_running(), name=self._name)
        return self.child

    async def stop(self) -> None:
        """Ends the present child without starting another one."""
        self._stopping.set()
        await self.child.stop()
        await self._task
        await self.child.stop()  # a child that was being started meanwhile

    async def _start_child(self) -> None:
        arguments = [
            _argument(key, value) for key, value in self._options.items() if value is not None
        ]
        self.child = await Child.start(
            self._name, self._module, arguments, on_message=self._note_message
        )

    def _note_message(self, message: dict[str, Any]) -> None:
        """Remembers the addresses that a child reports, for its successor."""
        for key, option in ADDRESS_OPTIONS.items():
            if message.get(key) is not None:
                self._options[option] = message[key]
        self._on_message(message)

    async def _keep_running(self) -> None:
        """Starts a new child whenever one ends, until the limit of restarts is reached or `stop` is
        called."""
        while True:
            reason = await self._end_of_child()
            if self._stopping.is_set():
                return
            pause_s = None
            if self.restarts:
                was_ready = self._ready_key in self.child.said
                pause_s = self._limit.pause_s(time.monotonic(), was_ready=was_ready)
            if pause_s is None:
                self._give_up(reason + (f" after {MAX_RESTARTS} restarts" if self.restarts else ""))
                return
            n_restarts = f"{self._limit.n_restarts} of {MAX_RESTARTS}"
            self._tell(f"{reason}; starting it again ({n_restarts})")
            if await self._is_stopped_within(pause_s):
                return
            try:
                await self._start_child()
            except OSError as error:
                self._give_up(f"{self._name} cannot be started again: {error}")
                return
            if self._stopping.is_set():
                return  # `stop` ends the new child, too

    async def _end_of_child(self) -> str:
        """Waits until the child ends, or kills it if it hangs. Returns the reason of the end."""
        watching = asyncio.create_task(self.child.kill_when_hung())
        try:
            return await self.child.obituary()
        finally:
            watching.cancel()

    async def _is_stopped_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def _argument(key: str, value: object) -> str:
    """Returns a setting as an option of the command line. A boolean becomes a flag."""
    if isinstance(value, bool):
        return f"--{key}" if value else f"--no-{key}"
    return f"--{key}={value}"
