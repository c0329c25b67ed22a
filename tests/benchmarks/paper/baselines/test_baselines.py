"""The launcher of the baselines starts the scheduler or the stages of a baseline."""

import pytest

from benchmarks.paper.baselines.__main__ import BaselineLauncher, BaselineSettings


@pytest.mark.parametrize("baseline", ["request_level", "microbatch"])
async def test_the_local_launcher_tells_the_scheduler_which_baseline(baseline: str) -> None:
    arguments = ["--model=.", f"--baseline={baseline}", "--microbatch-size=4", "--stages=2"]
    launcher = BaselineLauncher(BaselineSettings.load("baselines", arguments))
    options = launcher.scheduler_options(["a:1", "b:2"])
    assert (options["baseline"], options["microbatch-size"]) == (baseline, 4)
    assert options["stages"] == "a:1,b:2"


async def test_the_padded_baseline_is_in_the_stages() -> None:
    arguments = ["--model=.", "--baseline=padded", "--policy=orca"]
    launcher = BaselineLauncher(BaselineSettings.load("baselines", arguments))
    assert launcher.worker_module == "benchmarks.paper.baselines.padded"
    assert launcher.scheduler_module == "services.scheduler"
    assert "baseline" not in launcher.scheduler_options(["a:1"])
