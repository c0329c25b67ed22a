"""The life of a process: it tells its launcher when it is ready, stops on signals, dies with its
parent.

A launcher that starts a service locally hands it the write end of a pipe (`ready_fd`). The
service writes one JSON object per line: its addresses, progress while it loads, `ready`, and every
`BEAT_S` an empty one, by which the launcher knows that its event loop turns. In a cluster there is
no such pipe; health checks tell the same.
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
from collections.abc import Coroutine, Mapping
from typing import Any

import uvloop

from services.common.watchdog import watched

PR_SET_PDEATHSIG = 1  # linux/prctl.h
BEAT_S = 1.0
"""Seconds between the signs of life that a service gives its launcher."""

YOUNG_OBJECTS = 10_000
"""Objects by which those that were made outnumber those that were freed when the garbage collector
looks at the young ones again."""


class ReadyPipe:
    """Writes progress and readiness to the launcher, or nowhere if there is none."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def report(self, message: Mapping[str, object]) -> None:
        """Writes one line.

        Raises:
            BrokenPipeError: the launcher is gone.
        """
        if self._fd is not None:
            os.write(self._fd, json.dumps(message).encode() + b"\n")

    async def beat(self) -> None:
        """Writes an empty message every `BEAT_S`. Tells this process to stop when the launcher is
        gone: it may have died before `die_with_parent` was called.

        It leaves one out where the pipe is full: a launcher that is stopped must stop nobody.
        """
        if self._fd is None:
            return
        try:
            while True:
                if select.select([], [self._fd], [], 0)[1]:
                    self.report({})
                await asyncio.sleep(BEAT_S)
        except BrokenPipeError:
            signal.raise_signal(signal.SIGTERM)


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies, however it dies; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and connections as the system allows it; the usual
    limit, 1,024, is from a time of programs that could not handle more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # outside Linux, no limit may be more than there can be
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stop_event() -> asyncio.Event:
    """Returns an event that SIGTERM or SIGINT sets, instead of ending the process on the spot."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def freeze_objects() -> None:
    """Hides the objects that there are from the garbage collector: what was imported stays, and
    each full collection would hold up everything for the 50 to 80 ms that it takes to look at
    them. The young ones are looked at after `YOUNG_OBJECTS`, not 700: an iteration of many requests
    makes more than that, which are gone when the next one begins."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def end_within(limit_s: float, status: int) -> None:
    """Ends the process with `status` after `limit_s` seconds, if it has not ended by then: at its
    end the interpreter waits for threads, and one that is inside a library cannot be stopped."""
    timer = threading.Timer(limit_s, os._exit, (status,))
    timer.daemon = True
    timer.start()


async def happens_before(
    task: asyncio.Task[Any], event: asyncio.Event, *, cancel: bool = True
) -> bool:
    """Returns whether a task finished before an event was set; if not, the task is cancelled on
    request.

    A caller that is cancelled takes the task along.
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
    """Runs several coroutines until the first ends; cancels the others and raises its error."""
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

    Beats on the pipe to the launcher meanwhile, if there is one, and ends the process if the event
    loop no longer turns.
    """
    freeze_objects()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(watched(_beating(main, ReadyPipe(ready_fd))))


async def _beating(main: Coroutine[Any, Any, int], pipe: ReadyPipe) -> int:
    beating = asyncio.create_task(pipe.beat())
    try:
        return await main
    finally:
        beating.cancel()
