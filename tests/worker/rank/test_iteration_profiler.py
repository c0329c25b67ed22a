"""Real profiles of iterations: which are recorded, and which are written."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from services.worker.rank.iteration_profiler import IterationProfiler


def iteration() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def test_a_profiler_writes_the_iterations_it_was_ordered(tmp_path: Path) -> None:
    profiler, path = IterationProfiler(), tmp_path / "profile.json.gz"
    for index in range(6):
        if index == 2:
            profiler.order(2, str(path))
        with profiler:
            iteration()
        assert profiler.take() == (str(path) if index == 3 else None)
    trace = json.loads(gzip.decompress(path.read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("aten::mm") == 2


def test_a_profile_that_is_called_off_is_not_written(tmp_path: Path) -> None:
    profiler, path = IterationProfiler(), tmp_path / "profile.json.gz"
    profiler.order(2, str(path))
    with profiler:
        iteration()
    profiler.order(0, "")
    for _ in range(3):
        with profiler:
            iteration()
        assert profiler.take() is None
    assert not path.exists()


def test_a_place_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    profiler = IterationProfiler()
    profiler.order(1, str(tmp_path / "nowhere" / "profile.json.gz"))
    with profiler:
        iteration()
    with pytest.raises(OSError, match="nowhere"):
        profiler.take()
    with profiler:
        iteration()
    assert profiler.take() is None
