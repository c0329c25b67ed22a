"""Which build of the native library is used."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import TORCH, build, native_ops, ops_for
from kernels.native.library import library, open_library, runnable

needs_native = pytest.mark.skipif(not runnable(), reason="the native library is not built")


@pytest.fixture(name="nothing_built")
def hide_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the folder look as before `python -m kernels.build`."""
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    for cached in (library, native_ops):
        cached.cache_clear()
    yield
    for cached in (library, native_ops):
        cached.cache_clear()


@needs_native
def test_a_cpu_has_the_native_operations() -> None:
    assert ops_for(torch.device("cpu")) is native_ops()


@needs_native
def test_every_processor_can_run_the_portable_build() -> None:
    assert runnable()[-1] == build.PORTABLE
    assert set(runnable()) <= set(build.instruction_sets())


@pytest.mark.usefixtures("nothing_built")
def test_what_cannot_be_loaded_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    build.library_path(build.PORTABLE).write_text("not a library")
    assert ops_for(torch.device("cpu")) is TORCH
    assert "cannot be loaded" in caplog.text


@needs_native
def test_a_build_of_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kernels.native.library.sources_digest", lambda: "others")
    assert not runnable()
    assert "built from other sources" in caplog.text


@needs_native
def test_an_instruction_set_that_nobody_knows_is_not_there() -> None:
    has = open_library(build.PORTABLE).orcinus_has_instruction_set
    has.restype = ctypes.c_bool
    assert not has(b"avx1024")


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
