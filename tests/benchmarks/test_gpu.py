"""The benchmark of the GPU path: all of it runs, here in small on a CPU, and keeps failures."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import machine
from benchmarks.gpu import engine, limits, report, section, serving
from benchmarks.gpu.__main__ import names
from benchmarks.gpu.bench import Bench, Row, difference
from benchmarks.gpu.engine import covered
from benchmarks.gpu.report import Limits
from benchmarks.gpu.runners import Steps, random_model, runner_of
from benchmarks.gpu.section import SECTIONS, Outcome, Section, outcome_of
from benchmarks.gpu.shapes import LLAMA_8B, TINY
from benchmarks.workload import Lengths, mixed_lengths
from tests.limits import HANG_S

CPU = torch.device("cpu")

# All that is installed here and not where there is only PyTorch.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

MISSING = {
    "google", "grpc", "httptools", "matplotlib", "opentelemetry", "orcinus", "prometheus_client",
    "psutil", "pydantic", "pydantic_settings", "tqdm", "transformers", "uvloop",
}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run(out: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The benchmark in small, and what it said."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            f"--out={out}",
            "--tiny",
            "--device=cpu",
            *options,
        ],
        cwd=machine.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def results(out: Path) -> Any:
    """Returns the results that a run has written."""
    return json.loads((out / "gpu.json").read_text())


def workload_lengths() -> tuple[Lengths, ...]:
    """Returns the lengths of the workload's requests."""
    return mixed_lengths(
        TINY.n_requests, seed=0, prompts=TINY.prompt_tokens, outputs=TINY.output_tokens
    )


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A PYTHONPATH under which only PyTorch and what it needs can be imported."""
    path = tmp_path / "bare"
    path.mkdir()
    (path / "sitecustomize.py").write_text(WITHOUT)
    return str(path)


@pytest.mark.thorough
def test_kernels_and_engine_run_where_there_is_only_pytorch(tmp_path: Path, bare: str) -> None:
    pytest.importorskip("triton")
    ran = run(tmp_path, PYTHONPATH=bare, TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stderr
    found = results(tmp_path)
    assert found["meta"]["operations"] == "triton, interpreted"
    assert found["meta"]["command"].startswith("python -m benchmarks.gpu --out=")
    assert found["meta"]["versions"]["torch"] == torch.__version__
    sections = found["sections"]
    statuses = {name: outcome["status"] for name, outcome in sections.items()}
    assert statuses == dict.fromkeys(SECTIONS, "ok") | {"transformers": "skipped"}
    for name in ("attention", "operations", "engine"):
        for row in sections[name]["rows"]:
            assert 0 < row["floor_s"] / row["seconds"] == pytest.approx(row["of_floor"])
    compared = [row for row in sections["operations"]["rows"] if row["version"] == "torch"]
    assert all({"difference", "n_different"} & set(row) for row in compared)
    for operation in ("rotary_write_kv", "int8 down", "int8 gate and up"):
        assert any(row["case"].startswith(operation) for row in compared)
    (workload,) = sections["serving"]["rows"]
    asked = workload_lengths()
    assert workload["n_output_tokens"] == sum(each.n_output for each in asked)
    assert workload["n_prompt_tokens"] == sum(each.n_prompt for each in asked)
    assert "matplotlib is not installed" in ran.stderr
    assert not list(tmp_path.glob("*.png"))
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.thorough
def test_transformers_answers_the_same_requests_and_a_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ran = run(tmp_path, "--only=transformers")
    assert ran.returncode == 0, ran.stderr
    sections = results(tmp_path)["sections"]
    assert set(sections) == {"limits", "transformers"}
    rows = {row["version"]: row for row in sections["transformers"]["rows"] if "batch" not in row}
    assert rows["generate"]["n_output_tokens"] == rows["continuous batching"]["n_output_tokens"]
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


def test_a_section_that_is_not_there_is_refused() -> None:
    assert names("attention,engine") == ["attention", "engine"]
    with pytest.raises(argparse.ArgumentTypeError, match="there is no section speed"):
        names("attention,speed")


@pytest.mark.thorough
def test_a_section_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECTIONS, "limits", Section("benchmarks.gpu.limits", HANG_S))
    rows = tmp_path / "rows"
    assert section.in_process("limits", rows, device=CPU, is_tiny=True) is None
    found = Limits.of(outcome_of(section.read(rows), None))
    assert found is not None
    assert min(found.copy_bytes_per_s, found.read_bytes_per_s) > 0
    assert min(found.flops_per_s, found.launch_s) > 0


def test_a_section_is_ended_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECTIONS, "limits", Section("benchmarks.gpu.limits", 0.05))
    said = section.in_process("limits", tmp_path / "rows", device=CPU, is_tiny=True)
    assert said == "was ended after 0.05 s"


def test_a_failure_keeps_what_was_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECTIONS, "failing", Section("tests.benchmarks.failing_section", HANG_S))
    outcome = section.run("failing", tmp_path / "rows", device=CPU, is_tiny=True)
    assert (outcome.status, outcome.error) == ("failed", "ZeroDivisionError: division by zero")
    assert [row["case"] for row in outcome.rows] == ["before"]
    assert not outcome.is_good


def test_a_version_that_fails_is_a_row_and_only_ours_counts() -> None:
    good: Row = {"case": "a", "version": "ours", "seconds": 1.0}
    failed: Row = {"case": "a", "version": "torch", "error": "OutOfMemoryError: no"}
    assert outcome_of([good, failed], None).status == "ok"
    ours = outcome_of([good, failed | {"version": "ours, as in a graph"}], None)
    assert ours.status == "failed"
    assert ours.error == "1 rows, first OutOfMemoryError: no"


def test_a_section_that_was_ended_has_failed() -> None:
    outcome = outcome_of([{"case": "a", "version": "ours", "seconds": 1.0}], "was ended after 9 s")
    assert (outcome.status, outcome.error, len(outcome.rows)) == (
        "failed",
        "was ended after 9 s",
        1,
    )


def test_what_there_was_no_time_for_is_said() -> None:
    rows: list[Row] = []
    bench = Bench(CPU, TINY, ends_at=0.0, emit=rows.append)
    bench.attempt("late", "ours", lambda: {"seconds": 1.0})
    assert rows == [{"case": "late", "skipped": "out of time"}]
    assert outcome_of(rows, None).status == "incomplete"


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    outcome = Outcome(
        rows=[
            {"case": limits.COPY, "seconds": 2.0, "n_bytes": 160, "n_flops": 0},
            {"case": limits.READ, "seconds": 1.0, "n_bytes": 100, "n_flops": 0},
            {"case": limits.MATRIX, "seconds": 4.0, "n_bytes": 1, "n_flops": 4000},
            {"case": limits.LAUNCH, "seconds": 0.5, "n_bytes": 8, "n_flops": 0},
        ]
    )
    found = Limits.of(outcome)
    assert found == Limits(
        copy_bytes_per_s=80.0, read_bytes_per_s=100.0, flops_per_s=1000.0, launch_s=0.5
    )
    assert found.floor_s({"n_bytes": 300, "n_flops": 1000}) == 3.0
    assert found.floor_s({"n_bytes": 100, "n_flops": 5000}) == 5.0
    measured = Outcome(rows=[{"case": "a", "seconds": 6.0, "n_bytes": 300, "n_flops": 0}])
    report.finish(measured, found)
    assert measured.rows[0]["of_floor"] == 0.5


def test_kernels_that_run_together_count_once() -> None:
    assert covered([(5, 7), (0, 4), (2, 5), (10, 11), (10, 12)]) == 9
    assert covered([]) == 0


def test_kernels_of_a_profile_are_added_up() -> None:
    spans = ((0, 4, "a"), (2, 6, "b"), (8, 10, "a"))
    events = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))
        for start, end, name in spans
    ]
    row = engine.profile_of(events, step_s=4e-6)
    assert row["busy_s"] == pytest.approx(8e-6 / engine.N_PROFILED)
    assert row["outside_kernels"] == pytest.approx(0.5)
    assert [kernel["name"] for kernel in row["kernels"]] == ["a", "b"]


def test_a_profile_without_kernels_says_nothing_of_time() -> None:
    assert engine.profile_of([], step_s=1.0) == {"not_profiled": "no kernel was seen"}


def test_what_is_not_timed_like_the_rest_is_marked() -> None:
    row: Row = {"case": "a", "version": "torch", "seconds": 1.0, "is_graph": True}
    rows = [row, row | {"is_graph": False}, row | {"fits_cache": True}]
    recorded, eager, small = list(report.table(None, {"operations": Outcome(rows=rows)}))[-3:]
    assert eager == f"{recorded}  {report.WITH_HOST}"
    assert small == f"{recorded}  fits the cache"


@pytest.fixture
def bench() -> Bench:
    """Sizes for a CPU, all the time there is, and no rows."""
    return Bench(CPU, TINY, ends_at=float("inf"), emit=lambda row: None)


def test_two_runners_sample_the_same_tokens_after_the_same_context(bench: Bench) -> None:
    model = random_model(bench)
    tokens: engine.Tokens = {}
    rows = [
        engine.compare(tokens, Steps(runner_of(model, 16, has_graphs=False), n_blocks=16), 2, 20)
        for _ in range(2)
    ]
    assert [row.get("tokens_equal") for row in rows] == [None, True]
    tokens[2, 20][0][0] += 1
    steps = Steps(runner_of(model, 16, has_graphs=False), n_blocks=16)
    assert engine.compare(tokens, steps, 2, 20)["tokens_equal"] is False


def test_a_runner_serves_a_workload_again_in_the_same_iterations(bench: Bench) -> None:
    runner = runner_of(random_model(bench), 64, has_graphs=False)
    requests = serving.requests_of(bench)
    scheduler = serving.scheduler_of(64, max_requests=len(requests))
    first, again = (
        serving.serve(scheduler, runner, requests, name=name) for name in ("first", "again")
    )
    assert len(first.steps) == len(again.steps) > 1
    assert first.n_output == again.n_output == sum(each.n_output for each in requests)


def test_an_iteration_of_llama_8b_by_hand() -> None:
    """A layer has 4096 * (6144 + 4096) + 3 * 4096 * 14336 weights, the head 4096 * 128256; a
    token's keys and values are 128 KiB."""
    n_layers, n_head = 32 * 218_103_808, 525_336_576
    assert LLAMA_8B.iteration_bytes(0, 2) == 2 * (n_layers + n_head)
    assert LLAMA_8B.iteration_bytes(1, 2) - LLAMA_8B.iteration_bytes(0, 2) == 128 << 10
    assert LLAMA_8B.iteration_bytes(0, 2, layer_itemsize=1) == n_layers + 2 * n_head
    # One decode at the first position: each weight once, and one pair in 32 layers of 32 heads.
    assert LLAMA_8B.iteration_flops(1, 1, 1) == 2 * (n_layers + n_head) + 4 * 32 * 32 * 128


def test_versions_that_do_not_agree_are_a_failure() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert difference(torch.tensor([[3.0], [4.5]]), expected) == pytest.approx(0.1)
    assert difference(torch.tensor([3.0, torch.nan]), expected) == torch.inf
    near: Row = {"case": "a", "version": "torch", "seconds": 1.0, "difference": 0.004}
    assert outcome_of([near], None).is_good
    far = outcome_of([near, near | {"case": "b", "difference": 0.1}], None)
    assert (far.status, far.error) == ("failed", "versions differ in 1 cases, first b")


@pytest.mark.parametrize(
    ("said", "is_good"),
    [
        pytest.param({"n_different": 0, "max_different": 0}, True, id="the same tokens"),
        pytest.param({"n_different": 2, "max_different": 2}, True, id="as many as may differ"),
        pytest.param({"n_different": 1, "max_different": 0}, False, id="one that may not differ"),
        pytest.param({"tokens_equal": True}, True, id="graphs agree"),
        pytest.param({"tokens_equal": False}, False, id="graphs disagree"),
    ],
)
def test_tokens_that_differ_are_a_failure(said: Row, is_good: bool) -> None:
    assert outcome_of([{"case": "a", "version": "torch"} | said], None).is_good is is_good
