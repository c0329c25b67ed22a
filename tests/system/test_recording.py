"""A real run is recorded, with a loss in the middle, and the scheduling core comes to it again."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.system.stack import ROOT, Stack, serving


def ask(stack: Stack, index: int) -> list[int]:
    """The tokens of an answer; prompts begin alike, so that some of it is cached."""
    answer = stack.complete(
        [5, 6, 7, 8] * 12 + [20 + index],
        max_tokens=40 + 40 * (index % 4),
        seed=index,
        ignore_eos=True,
        priority=index % 2,
    )
    tokens: list[int] = answer["token_ids"]
    return tokens


def replay(path: Path) -> "subprocess.CompletedProcess[str]":
    """Runs the schedule again, in a process of its own."""
    command = [sys.executable, "-m", "services.scheduler.replay", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_a_recording_of_a_run_with_a_loss_comes_to_the_same_batches(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    options = f"record={path},admission=optimistic,n-slots=2048"
    with (
        serving(model, stages=2, max_batch_size=3, scheduler=options, fail_fast=False) as stack,
        ThreadPoolExecutor(8) as threads,
    ):
        with stack.iterations() as watch:
            answers = [threads.submit(ask, stack, index) for index in range(12)]
            watch.wait_for(lambda records: len(records) > 40)
            stack.kill("services.worker.rank", 1)
            assert [len(answer.result()) for answer in answers] == [40, 80, 120, 160] * 3
            epochs = {record.epoch for record in watch.records}
        assert len(epochs) == 2, "the watch went on"
        stack.look_at_tree()
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1]["type"] == "end"
    marks = [line["kind"] for line in lines if line["type"] == "mark"]
    assert marks == ["lost", "suspects", "draining"]
    ended = [line for line in lines if line.get("turn") == "ended"]
    assert [line["reason"] for line in ended] == ["length"] * 12
    kinds = "".join(line["kinds"] for line in lines if line["type"] == "iteration")
    assert set(kinds) == {"p", "d", "r"}
    replayed = replay(path)
    assert replayed.returncode == 0, replayed.stderr
    n_batches = sum("iteration" in line.get("selection", {}) for line in lines)
    assert replayed.stdout == f"{path}: {n_batches} batches, all the same\n"
    assert n_batches > 100
