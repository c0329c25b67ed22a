"""Ranks have a processor of their own while a system is measured."""

import os
import subprocess
import sys

import pytest

from benchmarks.pinning import RANK_MODULE, ranks_apart

CPUS = sorted(os.sched_getaffinity(0))
WAITS = "print(flush=True); input()"


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    child = subprocess.Popen(
        [sys.executable, "-c", WAITS, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline()
    return child


@pytest.mark.skipif(len(CPUS) < 2, reason="one processor is everybody's")
def test_every_system_in_turn_has_a_processor_for_its_ranks() -> None:
    for _ in range(2):
        with start(RANK_MODULE) as rank, start() as other:
            with ranks_apart():
                assert sorted(os.sched_getaffinity(rank.pid)) == CPUS[-1:]
                assert sorted(os.sched_getaffinity(other.pid)) == CPUS[:-1]
                assert sorted(os.sched_getaffinity(0)) == CPUS[:-1]
            assert sorted(os.sched_getaffinity(0)) == CPUS
            for child in (rank, other):
                child.kill()
