"""Compiles Triton kernels for an absent GPU: `python -m tests.kernels.triton.compile_only 90`.

A stub takes the place of Triton's driver and names the device, here of compute capability 9.0.
Launchers then run as they do in production, on tensors in the host's memory: `kernel[grid](...)`
compiles what it would launch, for just these arguments, and stops there. So results are garbage,
and nothing may depend on them.

The calls are those of `CASES` in every `compile_<name>.py` beside this file. For each kernel and
each form of it that they need, a line of JSON says what it takes (`CompiledKernel`).
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, get_ptxas_version
from triton.runtime.cache import get_cache_manager

from kernels import triton_ops
from tests.kernels.triton.compiled_cases import case_files

Cases = Mapping[str, Callable[[], object]]

CASE_LIMIT_S = 600.0
"""Seconds that one case may take; the process ends after them. Most take one to ten."""

_GLOBAL = re.compile(r"\b(ld|st)\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_TO_SHARED = re.compile(r"\bcp\.async\.c[ag]\.shared\.global .*?, 0x([0-9a-f]+)\b")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """The figures of ptxas and the compiler for one kernel in one form."""

    case: str  # the first that needed it
    kernel: str
    n_warps: int
    shared_bytes: int  # of a block
    n_registers: int  # of a thread
    stack_bytes: int
    spill_bytes: int  # stored and loaded
    loads: dict[str, int]  # instructions by the bytes that a thread reads with one
    stores: dict[str, int]


class _StubDriver:
    """Stands for a device that compiles and cannot run."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiler:
    """Compiles all kernels that this process launches, for one compute capability."""

    def __init__(self, capability: int) -> None:
        if triton.knobs.runtime.interpret:
            raise RuntimeError("the kernels of this process are interpreted (TRITON_INTERPRET)")
        self._capability = capability
        self._kernels: dict[str, Any] = {}  # by hash, in order
        self._cases: dict[str, str] = {}
        self._case = ""
        triton.runtime.driver.set_active(_StubDriver(capability))
        triton_ops()  # sets the compiler's knobs
        run = triton.JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            self._kernels.setdefault(kernel.hash, kernel)
            self._cases.setdefault(kernel.hash, self._case)
            return kernel

        triton.JITFunction.run = compile_only

    def call(self, name: str, call: Callable[[], object]) -> list[CompiledKernel]:
        """Runs a case. Returns the kernels that no earlier case needed."""
        self._case = name
        known = set(self._kernels)
        call()
        return [self._inspect(hash_) for hash_ in self._kernels if hash_ not in known]

    def _inspect(self, hash_: str) -> CompiledKernel:
        kernel = self._kernels[hash_]
        ptx = kernel.asm["ptx"]
        said = _assemble(ptx, self._capability)
        loads: dict[str, int] = {}
        stores: dict[str, int] = {}
        for kind, n_words, bits in _GLOBAL.findall(ptx):
            counts = loads if kind == "ld" else stores
            size = str(int(n_words or 1) * int(bits) // 8)
            counts[size] = counts.get(size, 0) + 1
        for n_bytes in _TO_SHARED.findall(ptx):
            size = str(int(n_bytes, 16))
            loads[size] = loads.get(size, 0) + 1
        return CompiledKernel(
            case=self._cases[hash_],
            kernel=kernel.name,
            n_warps=kernel.metadata.num_warps,
            shared_bytes=kernel.metadata.shared,
            n_registers=_number(r"Used (\d+) registers", said),
            stack_bytes=_number(r"(\d+) bytes stack frame", said),
            spill_bytes=_number(r"(\d+) bytes spill stores", said)
            + _number(r"(\d+) bytes spill loads", said),
            loads=loads,
            stores=stores,
        )


def _assemble(ptx: str, capability: int) -> str:
    """Returns the messages of ptxas about a kernel. They are cached beside Triton's compiled
    kernels."""
    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
    key = f"{get_ptxas_version(capability)} {arch} {ptx}"
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    kept = cache.get_file("ptxas.txt")
    if kept is not None:
        return Path(kept).read_text()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", str(source)]
        done = subprocess.run(
            [*command, "-o", f"{folder}/kernel.cubin"], check=True, capture_output=True, text=True
        )
    cache.put(done.stderr, "ptxas.txt")
    return done.stderr


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"ptxas does not say {pattern!r}: {text}")
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("capability", type=int, metavar="CAPABILITY", help="80, 86, 90, ...")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="cases whose names hold TEXT; several times"
    )
    arguments = parser.parse_args()
    compiler = Compiler(arguments.capability)
    for file in case_files():
        cases: Cases = import_module(f"tests.kernels.triton.{file.stem}").CASES
        for name, call in cases.items():
            if any(text in name for text in arguments.only or [""]):
                faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
                for kernel in compiler.call(name, call):
                    sys.stdout.write(json.dumps(asdict(kernel)) + "\n")


if __name__ == "__main__":
    main()
