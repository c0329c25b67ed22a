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
        pytest.param("190000 100000", 1, id="what-is-not-whole-is-no-thread"),
        pytest.param("100000000 100000", ALL, id="more-than-there-are"),
    ],
)
def test_the_quota_of_a_cgroup_limits_it(tmp_path: Path, limit: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cpus(tmp_path) == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [("-1", ALL), ("40000", 1), ("9900000", ALL), ("190000", 1)]
)
def test_so_does_that_of_the_first_version(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path) == expected


def test_outside_a_container_the_lowest_quota_of_all_groups_counts(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/user.slice/job.service\n")
    job = tmp_path / "user.slice" / "job.service"
    job.mkdir(parents=True)
    (job / "cpu.max").write_text("max 100000\n")
    (job.parent / "cpu.max").write_text("100000 100000\n")
    assert usable_cpus(tmp_path, membership) == 1


def test_so_it_does_with_groups_of_the_first_version(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/batch\n3:cpu,cpuacct:/batch/7\n0::/\n")
    job = tmp_path / "cpu" / "batch" / "7"
    job.mkdir(parents=True)
    (job / "cpu.cfs_quota_us").write_text("150000\n")
    (job / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path, membership) == 1


def test_groups_that_a_container_cannot_see_do_not_count(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/../../kubepods.slice/pod7\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert usable_cpus(tmp_path, membership) == 1
