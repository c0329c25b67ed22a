"""Keeps a service running: starts a new child process when the present one dies or hangs.

The new child gets the addresses of the former child, which the other services know. A child that
was ready is replaced at once. If a service ends again and again before it is ready, something is
wrong with it: the pauses before the next starts grow, and at last it is not started any more.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from services.local.child import Child, OnMessage

MAX_RESTARTS = 5
"""Largest number of restarts in a row of a service that does not become ready; then the service
stays dead."""
FIRST_PAUSE_S = 0.5
"""Seconds of pause before the second restart of a service that has not become ready.

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
    """Counts the restarts of a service that does not become ready, and chooses the pauses before
    them."""

    def __init__(self, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.n_failed = 0
        """Number of children in a row that have ended before they were ready."""
        self._first_pause_s = first_pause_s

    def pause_s(self, *, was_ready: bool) -> float | None:
        """Returns the seconds to pause before the next restart, or None if there is none.

        `was_ready` says whether the child that has ended was ready.
        """
        if was_ready:
            self.n_failed = 0
            return 0.0
        self.n_failed += 1
        if self.n_failed > MAX_RESTARTS:
            return None
        return self._first_pause_s * 2.0 ** (self.n_failed - 2) if self.n_failed > 1 else 0.0


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

        The launcher sets this once all services serve. A child that ends earlier would fail
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
            if not self.restarts:
                self._give_up(reason)
                return
            pause_s = self._limit.pause_s(was_ready=self._ready_key in self.child.said)
            if pause_s is None:
                self._give_up(f"{reason} after {MAX_RESTARTS} restarts")
                return
            n_failed = self._limit.n_failed
            attempt = f" ({n_failed} of {MAX_RESTARTS})" if n_failed else ""
            self._tell(f"{reason}; starting it again{attempt}")
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
