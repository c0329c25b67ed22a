"""A service as a child process.

The service writes messages to a pipe: its address, its progress in loading, and that it is ready.
Between its start and its end, a thread of the service also writes beats: empty messages that show
that the process runs.
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
"""Seconds after the end of a service for which its last messages are still read."""
MAX_MISSED_BEATS = 9
"""Number of checks, BEAT_S apart, without a new message after which a service that has sent beats
counts as hung.

If the machine is suspended or overloaded, the checks of this process are delayed like the beats, so
that the service is not killed for this reason.
"""
MAX_CHECKS_WITHOUT_BEATS = 240
"""Number of checks, BEAT_S apart, without a new message after which a service that sends no beats
counts as hung. A service sends no beats while it imports its modules and while it ends."""

OnMessage = Callable[[dict[str, Any]], None]
"""A function that is called with each message of a service."""


class ChildDied(Exception):
    """A service has ended unexpectedly."""


class Child:
    """A service that runs as a child of this process."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        on_message: OnMessage,
        *,
        turn_fd: int | None = None,
    ) -> None:
        """`turn_fd` is the write end of the pipe through which a spare is told to serve. It is None
        if the process is not a spare."""
        self.name = name
        self.said: dict[str, Any] = {}
        """All fields of the messages that the service has sent so far. A later value replaces an
        earlier one."""
        self._process = process
        self._turn_fd = turn_fd
        self._on_message = on_message
        self._n_messages = 0
        self._is_beating = False
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
        is_spare: bool = False,
    ) -> "Child":
        """Starts `python -m module` in a session of its own, so that Ctrl-C reaches only the
        launcher. With `is_spare`, the process starts up and then waits for `let_serve` before it
        serves.

        Raises:
            OSError: the process cannot be started.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as passed:
            report_fd, ready_fd = _pipe(ours, passed)
            options = {"ready-fd": ready_fd}
            turn_fd = None
            if is_spare:
                options["turn-fd"], turn_fd = _pipe(passed, ours)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                *(f"--{option}={fd}" for option, fd in options.items()),
                pass_fds=list(options.values()),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
            )
            ours.pop_all()
        child = cls(name, process, on_message, turn_fd=turn_fd)
        child._reading = asyncio.create_task(child._read(report_fd))
        return child

    @property
    def pid(self) -> int:
        """Id of the service's process."""
        return self._process.pid

    def let_serve(self) -> bool:
        """Lets a spare serve, by a byte in the pipe from which the spare reads. Returns False if
        the process has ended or is not a spare."""
        if self._turn_fd is None or self._process.returncode is not None:
            return False
        try:
            os.write(self._turn_fd, b"1")
        except BrokenPipeError:
            return False
        finally:
            self._close_turn()
        return True

    async def wait_for_end(self) -> None:
        """Waits until the process of the service has ended."""
        await self._process.wait()

    async def wait_for(self, key: str) -> Any:
        """Waits until the service reports a value under `key`, and returns the value.

        Raises:
            ChildDied: the service ended, or closed its pipe, before it reported such a value.
        """
        async with self._has_news:
            await self._has_news.wait_for(lambda: key in self.said or self._is_silent)
        if key not in self.said:
            raise ChildDied(self.name)
        return self.said[key]

    async def obituary(self) -> str:
        """Waits for the end of the service, and returns a sentence about how it ended: it hung, a
        signal killed it, or it exited. For a service that exited, the sentence has the error that
        the service has reported or, without such an error, the exit status."""
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
        """Watches the service, and kills it when it has sent no message for so long that it counts
        as hung."""
        n_messages, n_missed = 0, 0
        while n_missed < (MAX_MISSED_BEATS if self._is_beating else MAX_CHECKS_WITHOUT_BEATS):
            await asyncio.sleep(BEAT_S)
            n_missed = n_missed + 1 if n_messages == self._n_messages else 0
            n_messages = self._n_messages
        self._is_hung = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, *, limit_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the service with SIGTERM, or with SIGKILL if it has not ended after `limit_s`
        seconds."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), limit_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._reading.cancel()
        self._close_turn()

    def _close_turn(self) -> None:
        if self._turn_fd is not None:
            os.close(self._turn_fd)
            self._turn_fd = None

    async def _read(self, fd: int) -> None:
        """Reads the messages of the service until the service closes the pipe."""
        lines = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(fd, "rb")
        )
        try:
            while line := await lines.readline():
                self._n_messages += 1
                message = json.loads(line)
                self._is_beating |= not message
                self._is_beating &= "is_ending" not in message
                if message:
                    self.said.update(message)
                    self._on_message(message)
                    await self._tell_waiters()
        finally:
            transport.close()
            self._is_silent = True
            await self._tell_waiters()

    async def _tell_waiters(self) -> None:
        async with self._has_news:
            self._has_news.notify_all()


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """Returns the read end and the write end of a new pipe. When the stack `reader` is closed, it
    closes the read end. When the stack `writer` is closed, it closes the write end."""
    read_fd, write_fd = os.pipe()
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd


def _environment() -> dict[str, str]:
    # A service gets its settings on the command line. The variables `ORCINUS_*` are settings of the
    # launcher and would change the service.
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
