"""The whole tuner, on real processes: it finds settings, and leaves nobody behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from services.arena.sleeping.machine_here import share_of
from services.common.cpus import usable_cpus
from services.tune.layout import Layout
from services.tune.search import Candidate, Memory, Predictor
from services.tune.workload import Workload
from simulator.machines import MACHINES, MachineCosts
from simulator.outcome import LatencyLimits
from simulator.workload import mixed_lengths
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
LIMIT_S = 110.0
PAUSE_S = 0.1

pytestmark = [pytest.mark.thorough, pytest.mark.system, pytest.mark.timeout(300)]


def start(*arguments: str, module: str = "services.tune") -> "subprocess.Popen[str]":
    """Starts the tuner in a session of its own, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-m", module, f"--model={DEMO}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def sleeping_costs(layout: Layout) -> MachineCosts:
    """Returns the costs that sleeping ranks have, with short ways."""
    share = share_of(stages=layout.stages, tp=layout.tp, threads=layout.threads)
    return MachineCosts(
        MACHINES["processor"], layout.stages, share, plan_s=0.001, hop_s=0.001, result_s=0.001
    )


def test_it_finds_the_best_settings_of_ranks_whose_costs_are_known(tmp_path: Path) -> None:
    workload = Workload(mixed_lengths(48, seed=0), None, LatencyLimits(), seed=0)

    def value_of(candidate: Candidate) -> float:
        predictor = Predictor(sleeping_costs(candidate.layout), workload, Memory(100_000))
        return predictor(candidate).value

    n_cpus = usable_cpus()
    best = max(
        value_of(Candidate(layout, size, tokens))
        for layout in (Layout(1, 1, n_cpus), Layout(2, 1, max(1, n_cpus // 2)))
        for size in (16, 32, 64)
        for tokens in (256, 512, 1024, 2048)
    )
    tuner = start(
        "--budget-s=120",
        "--requests=48",
        f"--out={tmp_path}",
        module="benchmarks.serving.sleeping.tuner",
    )
    try:
        _, errors = tuner.communicate(timeout=220)
    finally:
        tuner.terminate()
        tuner.wait()
    assert tuner.returncode == 0, errors
    lines = (tmp_path / "local.env").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    of = {name: int(found[f"ORCINUS_{name}"]) for name in ("STAGES", "TP", "THREADS")}
    chosen = Candidate(
        Layout(of["STAGES"], of["TP"], of["THREADS"]),
        int(found["ORCINUS_MAX_BATCH_SIZE"]),
        int(found["ORCINUS_MAX_BATCH_TOKENS"]),
    )
    assert value_of(chosen) >= 0.95 * best


def test_it_tunes_the_demo_model_within_its_time(tmp_path: Path) -> None:
    began_s = time.monotonic()
    tuner = start("--budget-s=60", "--requests=48", f"--out={tmp_path}")
    try:
        output, errors = tuner.communicate(timeout=LIMIT_S)
    finally:
        tuner.terminate()
        tuner.wait()
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
        tuner.communicate(timeout=HANG_S)
        _, alive = psutil.wait_procs(children, timeout=HANG_S)
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
