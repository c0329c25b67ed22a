"""The memory limit of a container, and settings that need more."""

from pathlib import Path

import pytest

from services.common.memory_limit import MIB, PROCESS, memory_limit, trouble_of
from services.frontend.settings import FrontendSettings
from services.scheduler.settings import SchedulerSettings


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"], ids=["v2", "v1"])
def test_the_limit_is_read_from_either_version(cgroups: Path, name: str) -> None:
    (cgroups / name).write_text("536870912\n")
    assert memory_limit(cgroups) == 512 * MIB


def test_there_may_be_no_limit(cgroups: Path) -> None:
    assert memory_limit(cgroups) is None
    (cgroups / "memory.max").write_text("max\n")
    assert memory_limit(cgroups) is None


def test_outside_a_container_the_lowest_limit_of_all_groups_counts(cgroups: Path) -> None:
    membership = cgroups / "membership"
    membership.write_text("0::/user.slice/job.service\n")
    job = cgroups / "user.slice" / "job.service"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    (job.parent / "memory.max").write_text("536870912\n")
    assert memory_limit(cgroups, membership) == 512 * MIB


def test_what_needs_too_much_is_named_with_the_largest_first() -> None:
    parts = {PROCESS: 100 * MIB, "small": 20 * MIB, "large": 90 * MIB}
    assert not trouble_of(parts, None)
    assert not trouble_of(parts, 210 * MIB)
    trouble = trouble_of(parts, 209 * MIB)
    assert "210 MiB" in trouble
    assert "limit is 209 MiB" in trouble
    assert "lower large (90 MiB), small (20 MiB); the rest is the process itself" in trouble


def test_a_scheduler_that_could_need_more_than_it_may_does_not_start(cgroups: Path) -> None:
    (cgroups / "memory.max").write_text(str(512 * MIB))
    SchedulerSettings.load("scheduler", ["--n-stages=1"], cgroups=cgroups)
    with pytest.raises(SystemExit, match=r"^error: .* lower max_pool_tokens \(640 MiB\)"):
        SchedulerSettings.load(
            "scheduler", ["--n-stages=1", "--max-pool-tokens=134217728"], cgroups=cgroups
        )
    with pytest.raises(SystemExit, match=r"lower max_requests \(640 MiB\)"):
        SchedulerSettings.load(
            "scheduler", ["--n-stages=1", "--max-requests=32768"], cgroups=cgroups
        )


def test_a_frontend_that_could_need_more_than_it_may_does_not_start(cgroups: Path) -> None:
    needed = ["--model=models/x", "--scheduler=host:1"]
    (cgroups / "memory.max").write_text(str(1360 * MIB))
    FrontendSettings.load("frontend", needed, cgroups=cgroups)
    with pytest.raises(SystemExit, match=r"^error: .* lower max_in_flight_bytes \(1088 MiB\)"):
        FrontendSettings.load(
            "frontend", [*needed, "--max-in-flight-bytes=268435456"], cgroups=cgroups
        )


def test_a_scheduler_listens_on_this_machine_only_unless_told_otherwise() -> None:
    assert SchedulerSettings(n_stages=1).address == "localhost:50052"
