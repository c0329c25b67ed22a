"""The tools of a section of the GPU benchmark: device, operations, sizes, timer, and output of
rows."""

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.shapes import Scale
from benchmarks.gpu.timing import Timer
from kernels import TORCH, Ops, native_ops, ops_for, triton_ops

Row = dict[str, Any]
"""One measurement: the names of its case and version, its seconds, and the least bytes and
floating-point operations that the work needs. The keys are also the keys of the written rows."""

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

OURS = "ours"
"""Prefix of the names of the versions that this engine runs."""
GRAPHS, EAGER = f"{OURS}, with CUDA graphs", f"{OURS}, without CUDA graphs"
INT8 = f"{OURS}, int8 weights"


def progress(text: str) -> None:
    """Prints one line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def ours(device: torch.device) -> Ops:
    """Returns the operations that a rank runs on a device. On a CPU with TRITON_INTERPRET=1 in the
    environment, returns Triton's operations in Triton's interpreter: they are slow, but make the
    same calls as on a GPU."""
    if device.type == "cpu" and IS_INTERPRETED:
        return triton_ops() or ops_for(device)
    return ops_for(device)


def name_of(ops: Ops) -> str:
    """Returns the name of a set of operations for the report: `torch`, `native`, `triton`, or
    `triton, interpreted`."""
    if ops is TORCH:
        return "torch"
    if ops is native_ops():
        return "native"
    return "triton, interpreted" if IS_INTERPRETED else "triton"


@dataclass(slots=True)
class Version:
    """One implementation of a case. `calls` has one function for each set of inputs."""

    calls: Sequence[Callable[[], Tensor]]
    is_capturable: bool = True
    check: Callable[[], Tensor] | None = None
    """A function that returns the result to compare, for calls that change their inputs. If None,
    the result of the first call is compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """A computation that has several implementations, and the least bytes and floating-point
    operations that the computation needs."""

    name: str
    n_bytes: int
    n_flops: int
    versions: Mapping[str, Callable[[], Version]]  # made when its turn comes
    max_different_share: float = 0.0
    """Share of rows of logits in which a version may sample another token than the first version. A
    random number that lies between two tokens may be rounded to either."""


class Bench:
    """The device, operations, sizes, timer and row output that one section measures with."""

    OUT_OF_TIME = "out of time"

    def __init__(
        self,
        device: torch.device,
        scale: Scale,
        *,
        ends_at: float,
        emit: Callable[[Row], None],
    ) -> None:
        self.device = device
        self.scale = scale
        self.ops = ours(device)
        # Triton's interpreter reads the bits of bfloat16 as integers.
        is_interpreted = device.type == "cpu" and IS_INTERPRETED
        self.dtype = torch.float32 if is_interpreted else torch.bfloat16
        self.timer = Timer(device, budget_s=0.1 if device.type == "cuda" else 0.01)
        self._ends_at = ends_at
        self._emit = emit

    @property
    def is_over(self) -> bool:
        """Whether the section's time is over. Then the remaining cases are not measured."""
        return time.monotonic() > self._ends_at

    @property
    def cache_bytes(self) -> int:
        """Number of bytes of the device's last-level cache. 0 on a CPU, where inputs may stay in
        the cache."""
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def n_sets(self, n_bytes: int, limit: int = 24) -> int:
        """Returns the number of sets of inputs to use, of `n_bytes` each: as many as fill the cache
        twice, but at least 1 and at most `limit`."""
        return max(1, min(limit, -(-2 * self.cache_bytes // max(n_bytes, 1))))

    def free_bytes(self) -> int:
        """Frees unused memory and returns the number of free bytes on the device; on a CPU, always
        1 GiB."""
        self.release()
        if self.device.type != "cuda":
            return 1 << 30
        return int(torch.cuda.mem_get_info(self.device)[0])

    def release(self) -> None:
        """Collects garbage and returns cached device memory to the device."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def emit(self, row: Row) -> None:
        """Writes a row and reports progress."""
        self._emit(row)

    def skip(self, case: str, why: str) -> None:
        """Writes a row that says why a case was not measured."""
        self.emit({"case": case, "skipped": why})

    def attempt(self, case: str, version: str, work: Callable[[], Row]) -> None:
        """Writes a row with the result of `work`. If `work` raises an exception, the row has the
        error, and the section goes on. If the section's time is over, writes a row that says so."""
        if self.is_over:
            self.skip(case, self.OUT_OF_TIME)
            return
        row: Row = {"case": case, "version": version}
        try:
            row |= work()
        except Exception as error:  # noqa: BLE001 — whatever it is, it is what this row says
            row["error"] = f"{type(error).__name__}: {error}"
        self.emit(row)

    def measure(self, case: Case) -> None:
        """Times every version of a case and writes a row for each, with the difference of its
        result from the first version's result."""
        expected: list[Tensor] = []
        for name, make in case.versions.items():
            self.attempt(case.name, name, partial(self._time, case, make, expected))

    def _time(self, case: Case, make: Callable[[], Version], expected: list[Tensor]) -> Row:
        version = make()
        row: Row = {"n_bytes": case.n_bytes, "n_flops": case.n_flops}
        result = (version.check or version.calls[0])()
        if not expected:
            expected.append(result)
        elif result.is_floating_point():
            row["difference"] = difference(result, expected[0])
        else:
            row["n_different"] = int((result != expected[0]).sum())
            row["max_different"] = int(case.max_different_share * len(result))
        del result
        timing = self.timer.time(version.calls, is_capturable=version.is_capturable)
        return row | {
            "seconds": timing.device_s,
            "call_s": timing.call_s,
            "is_graph": timing.is_graph,
            "n_sets": len(version.calls),
            "fits_cache": case.n_bytes * len(version.calls) <= self.cache_bytes,
        }


def difference(result: Tensor, expected: Tensor) -> float:
    """Returns the norm of `result - expected` divided by the norm of `expected`. If `expected` is
    all zeros, returns the norm of the difference. Returns infinity if a number is not finite."""
    expected = expected.reshape(-1).float()
    size = float(expected.norm()) or 1.0
    distance = float((result.reshape(-1).float() - expected).norm()) / size
    return distance if math.isfinite(distance) else math.inf
