"""A process of the tests' own that takes orders, a line of JSON each, and answers each with one.

Attackers and honest clients run in processes of their own, so that neither slows the other down as
it would in one event loop.
"""

import asyncio
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

from tests.system.stack import ROOT

START_LIMIT_S = 60.0


class NoAnswer(Exception):
    """Raised when a helper has ended, or does not answer in time."""


class Helper:
    """`python -m MODULE`, which must call `obey`."""

    def __init__(self, module: str, arguments: Sequence[str], *, niceness: int = 0) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _set_niceness(self._process.pid, niceness)
        threading.Thread(target=self._read, daemon=True).start()
        self._answer(START_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def ask(self, order: Any, *, limit_s: float) -> Any:
        """Returns the answer to an order.

        Raises:
            NoAnswer: there is none within the limit.
        """
        if self._process.stdin is None:
            raise NoAnswer("its input is closed")
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer(limit_s)

    def _answer(self, limit_s: float) -> Any:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise NoAnswer(f"no answer in {limit_s:g} s") from None
        if not line:
            raise NoAnswer(f"ended with status {self._process.wait()}")
        return json.loads(line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while it is read
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")


def _set_niceness(pid: int, niceness: int) -> None:
    """Sets the priority of a process that leads a session. Where Linux groups processes by their
    sessions (`sched_autogroup_enabled`), a process's own counts only within its group, and each
    service of the system is in a group of its own."""
    os.setpriority(os.PRIO_PROCESS, pid, niceness)
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        group.write_text(str(niceness))


async def obey(serve: Callable[[Any], Awaitable[Any]]) -> None:
    """Says that it is ready, and gives each order to `serve` until there are no more."""
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    _say("ready")
    while line := await lines.readline():
        _say(await serve(json.loads(line)))


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
