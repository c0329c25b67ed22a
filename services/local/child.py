"""A service as a child process.

On a pipe the service reports its address, its progress, that it is ready, and every second that its
event loop turns.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from services.common.process import BEAT_S
from services.common.settings import PREFIX
from services.common.watchdog import HUNG_STATUS

STOP_TIMEOUT_S = 10.0
LAST_MESSAGE_S = 1.0
"""Seconds within which the messages of a service that has ended must be read."""
MAX_MISSED_BEATS = 8
"""Turns of this process's event loop, one a second, without a message after which a service counts
as hung.

On a machine that stands still or is overloaded the turns take longer, too.
"""
MAX_TURNS_TO_FIRST_BEAT = 60
"""Turns without a message that a service may take at first, while it imports."""

OnMessage = Callable[[dict[str, Any]], None]
"""A function that is given each message of a service."""


class ChildDied(Exception):
    """A service has ended unexpectedly."""


class Child:
    """A running service."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, on_message: OnMessage
    ) -> None:
        self.name = name
        self.said: dict[str, Any] = {}
        """All fields that the service has reported so far."""
        self._process = process
        self._on_message = on_message
        self._n_messages = 0
        self._is_hung = False
        self._is_silent = False
        self._has_news = asyncio.Condition()
        self._reading: asyncio.Task[None]

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        on_message: OnMessage = lambda _: None,
    ) -> "Child":
        """Starts `python -m module` in a session of its own, so that Ctrl-C reaches only the
        launcher."""
        read_fd, write_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                f"--ready-fd={write_fd}",
                pass_fds=[write_fd],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
            )
        finally:
            os.close(write_fd)
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_fd, "rb")
        )
        child = cls(name, process, on_message)
        child._reading = asyncio.create_task(child._read(lines))
        return child

    async def wait_for(self, key: str) -> Any:
        """Returns the value that the service reports under `key`, once it is reported.

        Raises:
            ChildDied: the service ended before.
        """
        async with self._has_news:
            await self._has_news.wait_for(lambda: key in self.said or self._is_silent)
        if key not in self.said:
            raise ChildDied(self.name)
        return self.said[key]

    async def obituary(self) -> str:
        """Waits for the end of the service; returns how it ended, and why if the service has
        reported that."""
        status = await self._process.wait()
        await asyncio.wait((self._reading,), timeout=LAST_MESSAGE_S)
        if self._is_hung or status == HUNG_STATUS:
            return f"{self.name} hung"
        if status < 0:
            return f"{self.name} was killed by {signal.Signals(-status).name}"
        if "error" in self.said:
            return f"{self.name}: {self.said['error']}"
        return f"{self.name} exited with status {status}"

    async def kill_when_hung(self) -> None:
        """Kills the service as soon as its event loop no longer turns."""
        n_messages, n_missed = 0, 0
        while n_missed < (MAX_MISSED_BEATS if n_messages else MAX_TURNS_TO_FIRST_BEAT):
            await asyncio.sleep(BEAT_S)
            n_missed = n_missed + 1 if n_messages == self._n_messages else 0
            n_messages = self._n_messages
        self._is_hung = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Ends the service with SIGTERM, and after a timeout with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._reading.cancel()

    async def _read(self, lines: asyncio.StreamReader) -> None:
        """Takes the service's messages until its end of the pipe is closed."""
        try:
            while line := await lines.readline():
                self._n_messages += 1
                if message := json.loads(line):
                    self.said.update(message)
                    self._on_message(message)
                    await self._tell_waiters()
        finally:
            self._is_silent = True
            await self._tell_waiters()

    async def _tell_waiters(self) -> None:
        async with self._has_news:
            self._has_news.notify_all()


def _environment() -> dict[str, str]:
    # Settings reach a service on its command line; the launcher's own variables are not for it.
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
