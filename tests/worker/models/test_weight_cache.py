"""Quantised matrices that are kept in a directory, and mapped at the next load."""

import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest
import torch

from kernels.packing.linear import pack
from kernels.packing.stored import StoredMatrix
from kernels.weights.linear import Quantization
from services.local.settings import LocalSettings
from services.worker.channel import RankEnd
from services.worker.models import weight_cache
from services.worker.models.directory_files import files_digest
from services.worker.models.packed_file import read_packed, write_packed
from services.worker.models.weight_cache import WeightCache
from services.worker.rank.stage_shard import StageShard
from services.worker.settings import PipelinePlace, WorkerSettings
from tests.checkpoints import write_checkpoint
from tests.limits import HANG_S
from tests.worker.models.quantised_writers import gptq, quantise
from tests.worker.pipeline import Pipeline, Span, load, needs_int8

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]

N_BUILDS = 5


@pytest.fixture(name="checkpoint")
def make_checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", hidden_size=96, intermediate_size=128)


@pytest.fixture(name="directory")
def make_directory(tmp_path: Path) -> Path:
    """A directory for a cache, which does not exist yet."""
    return tmp_path / "user" / "cache"


def cache_in(directory: Path, *, max_bytes: int = 10**9, build: str = "") -> WeightCache:
    return WeightCache(directory, max_bytes=max_bytes, build=build)


def logits(
    checkpoint: Path,
    cache: WeightCache | None,
    *,
    quantization: Quantization = "int4",
    n_stages: int = 1,
    tp_size: int = 1,
) -> torch.Tensor:
    """The logits after a prompt."""
    pipeline = Pipeline(
        checkpoint, quantization=quantization, cache=cache, n_stages=n_stages, tp_size=tp_size
    )
    pipeline.admit(0, len(TOKENS))
    return pipeline.run([Span(0, TOKENS)])[1]


@needs_int8
@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize(
    ("n_stages", "tp_size"), [(1, 1), (3, 1), (1, 2)], ids=["whole", "stages", "shares"]
)
def test_logits_are_equal_with_no_cache_a_cold_one_and_a_warm_one(
    checkpoint: Path, directory: Path, quantization: Quantization, n_stages: int, tp_size: int
) -> None:
    without, cold, warm = (
        logits(checkpoint, cache, quantization=quantization, n_stages=n_stages, tp_size=tp_size)
        for cache in (None, cache_in(directory), cache_in(directory))
    )
    assert torch.equal(cold, without)
    assert torch.equal(warm, without)
    assert len(list(directory.iterdir())) == n_stages * tp_size


@needs_int8
def test_matrices_that_the_checkpoint_has_quantised_are_kept(
    checkpoint: Path, directory: Path, tmp_path: Path
) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    quantise(checkpoint, tmp_path / "gptq", gptq(bits=4, group_size=32, is_symmetric=False), config)
    without, cold, warm = (
        logits(tmp_path / "gptq", cache, quantization="none")
        for cache in (None, cache_in(directory), cache_in(directory))
    )
    assert len(list(directory.iterdir())) == 1
    assert torch.equal(cold, without)
    assert torch.equal(warm, without)


@needs_int8
def test_a_warm_load_reports_all_bytes_as_loaded(checkpoint: Path, directory: Path) -> None:
    reports: list[list[tuple[int, int]]] = [[], []]
    for report in reports:

        def on_progress(n_done: int, n_total: int, report: list[tuple[int, int]] = report) -> None:
            report.append((n_done, n_total))

        load(checkpoint, quantization="int4", cache=cache_in(directory), on_progress=on_progress)
    cold, warm = reports[0][-1], reports[1][-1]
    assert warm == cold
    assert warm[0] == warm[1]


@needs_int8
def test_what_the_file_has_is_not_made(checkpoint: Path, directory: Path) -> None:
    matrix = pack(torch.ones(64, 64), "int4")
    for made in ([matrix], []):
        share = cache_in(directory).share("facts")
        found = share.matrix("name", made.pop)  # of an empty list, pop raises
        assert torch.equal(found(torch.eye(64)), matrix(torch.eye(64)))
        share.keep()


def cut(content: bytes) -> bytes:
    return content[:-100]


def flip(place: int) -> Callable[[bytes], bytes]:
    def flipped(content: bytes) -> bytes:
        damaged = bytearray(content)
        damaged[place] ^= 1
        return bytes(damaged)

    return flipped


@needs_int8
@pytest.mark.parametrize(
    "damage",
    [cut, lambda _: b"", flip(0), flip(12), flip(16), flip(40), flip(-1), flip(-4000)],
    ids=["cut", "empty", "mark", "length", "checksum", "header", "end", "matrix"],
)
def test_a_damaged_file_is_made_again(
    checkpoint: Path,
    directory: Path,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = logits(checkpoint, cache_in(directory))
    [path] = directory.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert torch.equal(logits(checkpoint, cache_in(directory)), expected)
    assert "is not used, and weights are packed again" in caplog.text
    assert path.read_bytes() == whole


@needs_int8
def test_a_file_is_of_one_checkpoint_build_and_quantisation(
    checkpoint: Path, directory: Path
) -> None:
    def n_files(*, build: str = "", quantization: Quantization = "int4") -> int:
        load(checkpoint, quantization=quantization, cache=cache_in(directory, build=build))
        return len(list(directory.iterdir()))

    assert [n_files(), n_files(), n_files(build="new"), n_files(quantization="int8")] == [
        1,
        1,
        2,
        3,
    ]
    os.utime(checkpoint / "model.safetensors", (1, 1))
    assert n_files() == 4


@needs_int8
def test_the_files_unused_for_longest_make_room(checkpoint: Path, directory: Path) -> None:
    def keep(build: str, max_bytes: int) -> Path:
        known = set(directory.glob("*"))
        cache = cache_in(directory, max_bytes=max_bytes, build=build)
        load(checkpoint, quantization="int4", cache=cache)
        return next(iter(set(directory.glob("*")) - known), directory)

    first = keep("first", 10**9)
    size = first.stat().st_size
    second = keep("second", 10**9)
    for path, time in ((first, 1), (second, 2)):
        os.utime(path, (time, time))
    assert keep("first", 10**9) == directory  # it is used, and now the newest
    third = keep("third", size * 5 // 2)
    assert set(directory.iterdir()) == {first, third}
    fourth = keep("fourth", size * 3 // 2)
    assert set(directory.iterdir()) == {fourth}


@needs_int8
def test_unfinished_files_are_removed_once_their_writers_have_ended(
    checkpoint: Path, directory: Path
) -> None:
    directory.mkdir(parents=True)
    abandoned = directory / f"{'a' * 32}.packed.tmp1"
    written = directory / f"{'b' * 32}.packed.tmp2"
    new = directory / f"{'c' * 32}.packed.tmp3"
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for path in (abandoned, new):
            path.touch()
        for path in (abandoned, written):
            os.utime(path, (0, 0))
        load(checkpoint, quantization="int4", cache=cache_in(directory))
        assert {written, new} < set(directory.iterdir())
    assert abandoned not in directory.iterdir()


@needs_int8
def test_weights_that_exceed_the_bound_are_not_kept(
    checkpoint: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(checkpoint, quantization="int4", cache=cache_in(directory, max_bytes=1000))
    assert not directory.exists()
    assert "exceed weight_cache_bytes" in caplog.text


@needs_int8
def test_a_directory_that_cannot_be_written_is_logged_and_loading_goes_on(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()  # a superuser may write into every directory, but not into a file
    expected = logits(checkpoint, None)
    assert torch.equal(logits(checkpoint, cache_in(tmp_path / "file" / "cache")), expected)
    assert f"packed weights are not kept in {tmp_path}/file/cache: " in caplog.text


@needs_int8
def test_ranks_that_write_at_once_leave_whole_files(
    checkpoint: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def load_often() -> None:
        for build in range(N_BUILDS):
            for _ in range(2):
                load(checkpoint, quantization="int4", cache=cache_in(directory, build=str(build)))

    with ThreadPoolExecutor(2) as ranks:
        for rank in [ranks.submit(load_often) for _ in range(2)]:
            rank.result(HANG_S)
    assert [it.message for it in caplog.records if it.levelno >= logging.WARNING] == []
    assert len([read_packed(path) for path in directory.iterdir()]) == N_BUILDS


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        ("auto", {"XDG_CACHE_HOME": "/var/cache", "HOME": "/home/a"}, "/var/cache/orcinus/weights"),
        ("auto", {"HOME": "/home/a"}, "/home/a/.cache/orcinus/weights"),
        ("off", {"HOME": "/home/a"}, None),
        ("/weights", {"HOME": "/home/a"}, "/weights"),
    ],
    ids=["user's cache", "home", "off", "directory"],
)
def test_the_launcher_keeps_weights_in_the_users_cache(
    setting: str,
    environment: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = LocalSettings.load("local", ["--model=/models/demo", f"--weight-cache={setting}"])
    assert settings.weight_cache_directory == (None if expected is None else Path(expected))


@needs_int8
def test_a_rank_keeps_its_matrices_where_its_settings_say_and_does_not_wait_for_it(
    checkpoint: Path,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = WorkerSettings(model=checkpoint, quantization="int4", weight_cache=directory)
    has_loaded = threading.Event()

    def write_late(file: IO[bytes], matrices: Mapping[str, StoredMatrix]) -> None:
        assert has_loaded.wait(HANG_S)
        write_packed(file, matrices)

    monkeypatch.setattr(weight_cache, "write_packed", write_late)
    ours, theirs = socket.socketpair()
    with ours, theirs, caplog.at_level("INFO"):
        for _ in range(2):
            StageShard.load(worker.for_rank(0).at(PipelinePlace(0, 1)), RankEnd(theirs))
            has_loaded.set()
            for thread in threading.enumerate():
                if thread.name == "weight cache":
                    thread.join(HANG_S)
    [path] = directory.iterdir()
    assert f"packed matrices are mapped from {path}" in caplog.text


@pytest.mark.parametrize("given", ["", "/weights"])
def test_a_rank_is_told_of_the_directory(given: str) -> None:
    arguments = ["--model=/models/demo", "--weight-cache-bytes=5GiB"]
    settings = WorkerSettings.load("worker", arguments + [f"--weight-cache={given}"] * bool(given))
    of_rank = settings.for_rank(0).at(PipelinePlace(0, 1))
    assert of_rank.weight_cache == (Path(given) if given else None)
    assert of_rank.weight_cache_bytes == 5 * 2**30


def test_another_file_in_the_place_of_a_checkpoints_has_another_digest(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    before, times = files_digest(checkpoint), weights.stat()
    copy = checkpoint / "copy"
    copy.write_bytes(weights.read_bytes())
    copy.replace(weights)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert files_digest(checkpoint) != before


@needs_int8
def test_files_of_a_user_are_no_part_of_the_cache(checkpoint: Path, directory: Path) -> None:
    directory.mkdir(parents=True)
    own = directory / "holiday.packed.tar"
    own.write_bytes(bytes(1000))
    os.utime(own, (0, 0))
    load(checkpoint, quantization="int4", cache=cache_in(directory))
    (kept,) = set(directory.iterdir()) - {own}
    kept_bytes = kept.stat().st_size
    for build in ("a", "b"):
        cache = cache_in(directory, max_bytes=kept_bytes, build=build)
        load(checkpoint, quantization="int4", cache=cache)
    assert own.exists()
    assert len(list(directory.iterdir())) == 2
