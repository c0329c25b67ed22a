"""How a lane of `make test` ends (`tests/lane.sh`), with a program in the place of pytest."""

import subprocess
from pathlib import Path

import pytest

from tests.limits import HANG_S

SCRIPT = Path(__file__).with_name("lane.sh")
AGAIN = ("--last-failed", "--last-failed-no-failures", "none")


def run(folder: Path, ended: str, *options: str) -> int:
    """Runs a lane whose pytest ends by the shell command `ended`. Returns the exit status."""
    command = [str(SCRIPT), str(folder), "bash", "-c", ended, "pytest", *options]
    return subprocess.run(command, timeout=HANG_S, check=False).returncode


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (5, 0), (1, 1), (2, 2), (3, 3), (4, 4)])
def test_a_lane_fails_by_everything_but_a_lack_of_tests(
    tmp_path: Path, status: int, expected: int
) -> None:
    assert run(tmp_path / "lane", f"exit {status}") == expected


def test_a_lane_fails_by_a_signal(tmp_path: Path) -> None:
    assert run(tmp_path / "lane", "kill -KILL $$") == 137


@pytest.mark.parametrize("status", [0, 5])
def test_a_lane_that_passed_does_not_run_again(tmp_path: Path, status: int) -> None:
    run(tmp_path, f"exit {status}")
    assert run(tmp_path, f"touch {tmp_path}/ran", *AGAIN) == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("status", "passes"), [(0, True), (1, False), (5, False)])
def test_tests_that_failed_run_again_and_must_pass(
    tmp_path: Path, status: int, passes: bool
) -> None:
    run(tmp_path, "exit 1")
    assert (run(tmp_path, f"exit {status}", *AGAIN) == 0) == passes


@pytest.mark.parametrize("ended", ["exit 2", "exit 3", "exit 4", "kill -KILL $$"])
def test_a_lane_that_did_not_run_whole_fails_again(tmp_path: Path, ended: str) -> None:
    run(tmp_path, "exit 0")
    run(tmp_path, ended)
    assert run(tmp_path, "exit 0", *AGAIN) == 1


def test_a_lane_that_never_ended_fails(tmp_path: Path) -> None:
    assert run(tmp_path, "exit 0", *AGAIN) == 1
