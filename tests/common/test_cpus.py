"""The CPUs that a process may use, by the files that the kernel has."""

import os
from pathlib import Path

import pytest

from services.common.cpus import usable_cpus

ALL = len(os.sched_getaffinity(0))


def test_without_a_cgroup_all_of_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == ALL


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        pytest.param("max 100000", ALL, id="no-limit"),
        pytest.param("50000 100000", 1, id="half-a-cpu-is-one"),
        pytest.param("100000 100000", 1, id="one"),
        pytest.param("150000 100000", min(2, ALL), id="one-and-a-half-are-two"),
        pytest.param("100000000 100000", ALL, id="more-than-there-are"),
    ],
)
def test_the_quota_of_a_cgroup_limits_it(tmp_path: Path, limit: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cpus(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", ALL), ("40000", 1), ("9900000", ALL)])
def test_so_does_that_of_the_first_version(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path) == expected
