"""Compiles a grammar in a thread of its own, whose stack is large.

llguidance releases the interpreter lock while it compiles, so other threads run meanwhile. An
iteration lasts until the slowest of the threads that compute it has ended, and each of these
threads may be bound to a CPU. So a compilation that is not urgent runs on any CPU of the worker,
with a lower priority. A compilation that takes too long does not delay other compilations, because
each has its own thread.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

STACK_BYTES = 16 * 2**20
"""Stack size in bytes of the thread: four times the stack with which frontends check a grammar."""

NICENESS = 10
"""Niceness that is added for a compilation that is not urgent. If iterations leave no CPU idle,
such a compilation gets a tenth of one CPU."""

Result = TypeVar("Result")


def in_thread(work: Callable[[], Result], *, is_urgent: bool) -> "Future[Result]":
    """Calls `work` in a new thread, and returns the future of its result. Unless `is_urgent` is
    true, the thread has a lower priority."""
    future: Future[Result] = Future()
    thread = threading.Thread(
        target=_do, args=(work, future, is_urgent), name="grammar", daemon=True
    )
    others = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(others)
    return future


def _do(work: Callable[[], Result], future: "Future[Result]", is_urgent: bool) -> None:
    try:
        if not is_urgent:
            _give_way()
        result = work()
    except BaseException as error:  # noqa: BLE001 (a panic of llguidance is no Exception)
        future.set_exception(error)
    else:
        future.set_result(result)


def _give_way() -> None:
    """Lowers the priority of the calling thread, and lets it run on any CPU that the parent
    process, the worker's controller, may use. On Linux, both calls affect only this thread."""
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    with suppress(OSError):  # a container may forbid it
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))  # the controller is not bound
