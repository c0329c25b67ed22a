"""The arena on real systems: with ranks that sleep, and with a policy of a package in a server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.local_system import READY
from tests.arena.test_writing_a_policy import POLICY
from tests.limits import HANG_S
from tests.scheduler.core.installed import install

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"

pytestmark = [pytest.mark.thorough, pytest.mark.system, pytest.mark.timeout(900)]

GREEDY = POLICY.replace('"one_prompt"', '"greedy"').replace(
    "len(selections) == self.max_batch_size", "False"
)
"""A policy that overbooks batches."""


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": "" if path is None else str(path)}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=10 * HANG_S,
        check=False,
    )


def test_a_file_runs_in_virtual_time_and_on_ranks_that_sleep(tmp_path: Path) -> None:
    path = tmp_path / "one_prompt.py"
    path.write_text(POLICY)
    options = ("--sleeping", str(DEMO), "--machine=accelerator", "--calibration-s=3", "--json")
    done = run("services.arena", "request_level", str(path), "--requests=12", *options)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["policy"], one["way"]) for one in found] == [
        ("request_level", "virtual"),
        ("request_level", "sleeping"),
        ("request_level", "replayed"),
        ("one_prompt", "virtual"),
        ("one_prompt", "sleeping"),
        ("one_prompt", "replayed"),
    ]
    assert {one["n_requests"] for one in found} == {12}
    assert all(one["select_us"] > 0 and one["n_preemptions"] == 0 for one in found)
    # The answers of a batch come together, also from a real system.
    assert found[1]["gap_p50_s"] < 0.5 * found[4]["gap_p50_s"]


def test_a_policy_of_a_package_serves_and_ends_the_scheduler_when_it_breaks_a_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = POLICY + GREEDY[GREEDY.index("class OnePrompt") :].replace("OnePrompt", "Greedy")
    points = "[orcinus.policies]\none_prompt = p:OnePrompt\ngreedy = p:Greedy\n"
    install(tmp_path, monkeypatch, points=points, source=source, module="p")
    load = ("--requests=6", "--users=6", "--prompt-tokens=8", "--output-tokens=8")
    options = (str(DEMO), "--fail-fast", "--max-batch-size=2")
    good = run("services.cli", "bench", *load, *options, "--policy=one_prompt", path=tmp_path)
    assert good.returncode == 0, good.stderr
    serving = subprocess.Popen(
        [sys.executable, "-m", "services.local", "--http-port=0", "--grpc-port=0", "--model",
         *options, "--policy=greedy"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert serving.stdout is not None
    found = READY.match(serving.stdout.readline())
    assert found is not None
    assert run("services.cli", "bench", *load, "--url", found[1]).returncode != 0
    _, said = serving.communicate(timeout=HANG_S)
    assert re.search(
        r"scheduler: policy greedy: \d requests are selected, and max_batch_size is 2", said
    )
    unknown = run("services.cli", "bench", *load, *options, "--policy=unheard-of", path=tmp_path)
    assert "there is no policy 'unheard-of'; known are chunked" in unknown.stderr
    assert "and of installed packages greedy, one_prompt" in unknown.stderr
