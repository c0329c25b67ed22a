"""A profile of a stage that serves, ordered as a person does it."""

import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.limits import HANG_S
from tests.system.stack import ROOT, Stack


def order(stack: Stack, stage_index: int, *options: str) -> subprocess.CompletedProcess[str]:
    address = stack.stage_addresses()[stage_index]
    command = [sys.executable, "-m", "services.worker.profile", address, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.thorough
def test_a_profile_of_a_stage_that_serves(two_stages: Stack, profiles: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        ordered = threads.submit(order, two_stages, 1, "--iterations=5")
        while not ordered.done():
            two_stages.complete([5, 6, 7], max_tokens=20, ignore_eos=True)
    result = ordered.result()
    assert result.returncode == 0, result.stderr
    [path] = profiles.iterdir()
    assert result.stdout == f"{path}\n"
    assert path.name.startswith("stage-1-rank-0-")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(str(event.get("name")).startswith("aten::") for event in events)
    assert two_stages.complete([5, 6, 7], max_tokens=5, ignore_eos=True)["token_ids"]


def test_without_a_directory_nobody_gets_one(one_stage: Stack) -> None:
    result = order(one_stage, 0)
    assert result.returncode == 1
    assert result.stderr.startswith("PERMISSION_DENIED: no profiles are taken here")
