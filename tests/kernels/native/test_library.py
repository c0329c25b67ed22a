"""Which build of the native library is used."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import TORCH, build, native_ops, ops_for
from kernels.native.library import library, runnable

needs_native = pytest.mark.skipif(not runnable(), reason="the native library is not built")
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")

BEST = next(iter(build.instruction_sets()))
BUILT = runnable()
INSTALLED = build.LIBRARIES


def make_processor_library(*, has_every_feature: bool) -> None:
    """Writes a library that says of every feature that the processor has it, or has it not."""
    path = build.library_path(build.PROCESSOR)
    text = f"int orcinus_has_feature(const char* feature) {{ return {int(has_every_feature)}; }}"
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", path], input=text.encode(), check=True)
    with path.open("ab") as file:
        file.write(build.sources_digest().encode())


@pytest.fixture(name="nothing_built")
def hide_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes the folder look as before `python -m kernels.build`."""
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    for cached in (library, native_ops):
        cached.cache_clear()
    yield tmp_path
    for cached in (library, native_ops):
        cached.cache_clear()


@needs_native
def test_a_cpu_has_the_native_operations() -> None:
    assert ops_for(torch.device("cpu")) is native_ops()


@needs_native
def test_builds_that_the_processor_can_run_are_found_best_first() -> None:
    fitting = build.runnable_with(build.processor_features())
    assert runnable() == [name for name in fitting if build.library_path(name).exists()]


@pytest.mark.usefixtures("nothing_built")
def test_what_cannot_be_loaded_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    build.library_path(build.PROCESSOR).write_text(build.sources_digest())
    assert ops_for(torch.device("cpu")) is TORCH
    assert "cannot be loaded" in caplog.text


@needs_native
def test_a_build_of_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "sources_digest", lambda machine: "others")
    assert not runnable()
    assert "built from other sources" in caplog.text


@needs_native
def test_a_feature_of_processors_that_the_library_does_not_know_is_told() -> None:
    for name in (build.PROCESSOR, runnable()[0]):
        has = ctypes.CDLL(str(build.library_path(name))).orcinus_has_feature
        assert has(b"avx1024") == -1


@needs_compiler
@pytest.mark.usefixtures("nothing_built")
def test_a_build_that_the_processor_cannot_run_is_left_alone() -> None:
    make_processor_library(has_every_feature=False)
    for name in build.instruction_sets():
        build.library_path(name).write_text(build.sources_digest())
    assert runnable() == [build.PORTABLE]


@needs_native
@needs_compiler
@pytest.mark.skipif(BUILT[-1:] == [BEST], reason="only the best build is there")
def test_the_log_names_the_build_that_this_processor_lacks(
    nothing_built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(build.library_path(BUILT[-1], INSTALLED), nothing_built)
    make_processor_library(has_every_feature=True)
    with caplog.at_level("INFO"):
        assert library() is not None
    assert f"native kernels for {BUILT[-1]}" in caplog.text
    assert f"{BEST} is faster on this processor" in caplog.text


@pytest.mark.thorough
@needs_native
def test_one_openmp_runtime_serves_both() -> None:
    program = """
import torch
from kernels import native_ops
native_ops().silu_and_mul(torch.ones(512, 4096))
torch.ones(512, 4096).exp()
words = open("/proc/self/maps").read().split()
names = ("libgomp", "libiomp", "libomp")
print(len({word for word in words if any(name in word for name in names)}))
"""
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.strip() == "1"


@pytest.mark.usefixtures("nothing_built")
def test_without_a_build_pytorch_does_it_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert all(ops_for(torch.device("cpu")) is TORCH for _ in range(3))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "python -m kernels.build" in caplog.text
