"""The life of a process: it reports to its launcher, stops on signals, and dies with its parent.

A launcher that starts a service locally passes it the write end of a pipe (`ready_fd`). The service
writes one JSON object per line: its addresses, its progress while it loads, `ready`, and every
`BEAT_S` seconds an empty object (a beat), which shows that the process runs. In a cluster there is
no such pipe, and health checks report the same facts.

Beats come from a thread. They cease when the process is stopped, gets no processor time, or is in a
call that holds the interpreter lock. An event loop that hangs is found by the watchdog.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

import uvloop

from services.common.watchdog import watched

PR_SET_PDEATHSIG = 1  # linux/prctl.h
BEAT_S = 0.25
"""Seconds between two beats."""

YOUNG_OBJECTS = 10_000
"""Number of live objects created since the last collection after which the garbage collector
examines the youngest generation."""


class ReadyPipe:
    """Writes the progress and the readiness of a service to its launcher. Does nothing if the
    service has no launcher."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def report(self, message: Mapping[str, object]) -> None:
        """Writes a message to the launcher, as one line of JSON.

        Raises:
            BrokenPipeError: the launcher is gone.
        """
        if self._fd is not None:
            os.write(self._fd, json.dumps(message).encode() + b"\n")

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """During the `with` block, writes an empty message (a beat) at once and every `BEAT_S`
        seconds, and stops this process when the launcher is gone. At the end of the block, writes
        a message which says that no beats follow.

        The check for the launcher is needed because it may have died before `die_with_parent` was
        called. If the pipe is full, no beat is written, so that a paused launcher does not block
        this process.
        """
        if self._fd is None:
            yield
            return
        with contextlib.suppress(BrokenPipeError):  # the thread stops this process
            self.report({})
        is_over = threading.Event()
        thread = threading.Thread(
            target=self._beat, args=(self._fd, is_over), name="beats", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            with contextlib.suppress(BrokenPipeError):
                self.report({"is_ending": True})

    def _beat(self, fd: int, is_over: threading.Event) -> None:
        try:
            while not is_over.wait(BEAT_S):
                if select.select([], [fd], [], 0)[1]:
                    self.report({})
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent process dies. Works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for_turn(fd: int | None, *, ready_fd: int | None) -> None:
    """Reports to the launcher that this process is a spare process, and waits until the launcher
    lets the process serve. `fd` is the read end of a pipe. The function returns when the launcher
    writes a byte to the pipe. If the launcher closes the pipe, the process ends. Returns at once if
    `fd` is None."""
    if fd is None:
        return
    with contextlib.suppress(BrokenPipeError):  # then the launcher has ended, as `read` shows
        ReadyPipe(ready_fd).report({"waits_for_turn": True})
    is_called = bool(os.read(fd, 1))
    os.close(fd)
    if not is_called:
        sys.exit(0)


def raise_descriptor_limit() -> None:
    """Raises the limit of open files and connections to the system's maximum. The usual limit of
    1,024 is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # outside Linux, no limit may be more than there can be
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stop_event() -> asyncio.Event:
    """Returns an event, and makes SIGTERM and SIGINT set this event instead of ending the process.
    A SIGTERM that arrived while the signal was blocked sets the event, too."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    take_sigterm()
    return event


def take_sigterm() -> None:
    """Unblocks SIGTERM in this thread. Call it once the process has a handler for the signal.

    Images start the process with the signal blocked, because process 1 of a container would lose a
    signal for which it has no handler yet.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def freeze_objects() -> None:
    """Excludes all present objects from garbage collection, and makes the collector examine young
    objects less often.

    Imported objects are never freed, and each full collection would stop the process for 50 to 80
    ms to examine them. Young objects are examined after `YOUNG_OBJECTS` new objects instead of 700:
    an iteration of many requests creates more than 700 objects, which become free when the next
    iteration begins.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def end_within(limit_s: float, status: int) -> None:
    """Ends the process with the exit status `status` after `limit_s` seconds, unless it has ended
    before.

    This is needed because the interpreter waits for threads when it ends, and a thread inside a
    library cannot be stopped.
    """
    timer = threading.Timer(limit_s, os._exit, (status,))
    timer.daemon = True
    timer.start()


async def happens_before(
    task: asyncio.Task[Any], event: asyncio.Event, *, cancel: bool = True
) -> bool:
    """Waits until a task has finished or an event is set. Returns whether the task finished before
    the event was set. If not, the task is cancelled unless `cancel` is false.

    If the caller is cancelled, the task is cancelled, too.
    """
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        waiting.cancel()
    if not task.done() and cancel:
        task.cancel()
        await asyncio.wait((task,))
        return False
    return task.done()


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Runs several coroutines until the first one ends, and then cancels the others. Raises the
    error of the first one if it failed."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


def run(main: Coroutine[Any, Any, int], *, ready_fd: int | None = None) -> int:
    """Runs a service's main coroutine on uvloop and returns its exit status.

    While it runs, beats are written to the launcher's pipe, if there is one, and a watchdog ends
    the process if the event loop hangs.
    """
    freeze_objects()
    with (
        ReadyPipe(ready_fd).beating(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(watched(main))
