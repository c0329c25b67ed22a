"""The Triton kernels compile for real GPUs, which need not be there, within their limits."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.kernels.triton.compile_only import CompiledKernel
from tests.kernels.triton.compiled_cases import cases_by_capability

# Shared memory that a block can have, by compute capability; 8.6 and 8.9 have the least.
SHARED_BYTES = {80: 99 << 10, 90: 227 << 10}

# A register or two of hundreds, which versions of the compiler find room for or do not.
MOST_SPILLED_BYTES = 16

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(0),  # each case has a limit of its own, however many there are
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]


@pytest.fixture(scope="module", name="compiled")
def compile_all() -> Mapping[int, Sequence[CompiledKernel]]:
    """The kernels of the chosen cases, by the capability that they were compiled for."""
    cases = cases_by_capability(list(SHARED_BYTES))
    with ThreadPoolExecutor() as pool:
        return dict(zip(cases, pool.map(compile_for, cases.keys(), cases.values()), strict=True))


def compile_for(capability: int, cases: Sequence[str]) -> Sequence[CompiledKernel]:
    """Compiles cases in a process of its own, since this one may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile_only", str(capability)]
    command += [f"--only={case}" for case in cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines: list[Mapping[str, Any]] = list(map(json.loads, done.stdout.splitlines()))
    return [CompiledKernel(**line) for line in lines]


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_fit_the_device(
    capability: int, compiled: Mapping[int, Sequence[CompiledKernel]]
) -> None:
    kernels = compiled[capability]
    assert kernels
    limit = SHARED_BYTES[capability]
    assert [kernel for kernel in kernels if kernel.shared_bytes > limit] == []


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_keep_their_numbers_in_registers(
    capability: int, compiled: Mapping[int, Sequence[CompiledKernel]]
) -> None:
    kernels = compiled[capability]
    assert [kernel for kernel in kernels if kernel.spill_bytes > MOST_SPILLED_BYTES] == []
