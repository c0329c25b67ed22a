"""Compiles a grammar in a thread of its own, whose stack is large.

llguidance releases the interpreter lock while it compiles, so other threads run meanwhile. A
compilation that takes too long delays no other one, since each has its own thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 16 * 2**20
"""Stack size in bytes of the thread: four times that of the check by frontends."""

Result = TypeVar("Result")


def in_thread(work: Callable[[], Result]) -> "Future[Result]":
    """Begins work in a new thread and returns the future of its result."""
    future: Future[Result] = Future()
    thread = threading.Thread(target=_do, args=(work, future), name="grammar", daemon=True)
    others = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(others)
    return future


def _do(work: Callable[[], Result], future: "Future[Result]") -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 (a panic of llguidance is no Exception)
        future.set_exception(error)
    else:
        future.set_result(result)
