"""The whole tuner, on real processes: it finds settings, and leaves nobody behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
LIMIT_S = 110.0
PAUSE_S = 0.1

pytestmark = [pytest.mark.thorough, pytest.mark.system, pytest.mark.timeout(180)]


def start(*arguments: str) -> "subprocess.Popen[str]":
    """Starts the tuner in a session of its own, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-m", "services.tune", f"--model={DEMO}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_it_tunes_the_demo_model_within_its_time(tmp_path: Path) -> None:
    began_s = time.monotonic()
    tuner = start("--budget-s=60", "--requests=48", f"--out={tmp_path}")
    try:
        output, errors = tuner.communicate(timeout=LIMIT_S)
    finally:
        tuner.kill()
    assert tuner.returncode == 0, errors
    assert time.monotonic() - began_s < LIMIT_S
    assert output.splitlines()[1].startswith("* ")
    assert "max_batch_size" in output
    assert "ORCINUS_MAX_BATCH_TOKENS=" in (tmp_path / "local.env").read_text()
    assert (tmp_path / "kustomization.yaml").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_takes_its_children_with_it(number: signal.Signals, tmp_path: Path) -> None:
    tuner = start(f"--out={tmp_path}")
    try:
        children = wait_for_children(tuner.pid, n_at_least=4)
        os.kill(tuner.pid, number)
        tuner.communicate(timeout=30)
        _, alive = psutil.wait_procs(children, timeout=20)
    finally:
        tuner.kill()
    assert alive == []
    assert not list(tmp_path.iterdir())
    assert tuner.returncode == 130


def wait_for_children(pid: int, *, n_at_least: int) -> list[psutil.Process]:
    """Returns the processes that the tuner has started, when there are so many."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        children = psutil.Process(pid).children(recursive=True)
        if len(children) >= n_at_least:
            return children
        time.sleep(PAUSE_S)
    raise AssertionError("it starts nobody")
