"""A service as a child process. It reports on a pipe where it listens, how far it is, and that it
is ready."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from services.common.settings import PREFIX

STOP_TIMEOUT_S = 10.0


class ChildDied(Exception):
    """Raised when a service has ended that should not have."""


class Child:
    """A running service."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, lines: asyncio.StreamReader
    ) -> None:
        self.name = name
        self.said: dict[str, Any] = {}
        """All messages that were read from the service so far."""
        self._process = process
        self._lines = lines

    @classmethod
    async def start(cls, name: str, module: str, arguments: Sequence[str]) -> "Child":
        """Starts `python -m module` in a session of its own, so that Ctrl-C reaches only the
        launcher."""
        read_fd, write_fd = os.pipe()
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
        os.close(write_fd)
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_fd, "rb")
        )
        return cls(name, process, lines)

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the messages of the service.

        Raises:
            ChildDied: it ended.
        """
        while line := await self._lines.readline():
            message = json.loads(line)
            self.said.update(message)
            yield message
        raise ChildDied(self.name)

    async def wait_for(self, key: str) -> Any:
        """Returns the value of the first message that has `key`.

        Raises:
            ChildDied: it ended before.
        """
        async for message in self.messages():
            if key in message:
                return message[key]
        raise AssertionError("messages() ends by an error")

    async def obituary(self) -> str:
        """Returns how the service ended, once it has."""
        status = await self._process.wait()
        if status < 0:
            return f"{self.name} was killed by {signal.Signals(-status).name}"
        return f"{self.name} exited with status {status}"

    async def stop(self) -> None:
        """Ends the service: by SIGTERM, and after a timeout by SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _environment() -> dict[str, str]:
    # Settings reach a service on its command line; the launcher's own variables are not for it.
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
