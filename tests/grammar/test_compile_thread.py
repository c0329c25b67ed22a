"""A compilation gives way to the threads that compute iterations."""

import os
import threading

import pytest

from services.grammar.compile_thread import NICENESS, in_thread

LIMIT_S = 60


def place() -> tuple[set[int], int]:
    """Returns the CPUs and the niceness of the calling thread."""
    return os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)


def in_bound_thread(*, is_urgent: bool) -> tuple[set[int], int]:
    """Returns where work runs that a thread begins which is bound to one CPU."""
    found: list[tuple[set[int], int]] = []

    def begin() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.append(in_thread(place, is_urgent=is_urgent).result(LIMIT_S))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join(LIMIT_S)
    return found[0]


def test_work_that_is_not_urgent_gives_way() -> None:
    cpus, niceness = place()
    assert in_bound_thread(is_urgent=False) == (cpus, min(19, niceness + NICENESS))
    assert in_bound_thread(is_urgent=True) == ({min(cpus)}, niceness)
    assert place() == (cpus, niceness)


def test_any_error_is_the_result() -> None:
    def panic() -> None:
        raise SystemExit("a panic")

    with pytest.raises(SystemExit, match="a panic"):
        in_thread(panic, is_urgent=True).result(LIMIT_S)
