"""The report of the GPU benchmark: each row's time compared with its floor, as JSON and as a
table."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu import limits
from benchmarks.gpu.bench import Row, name_of, ours
from benchmarks.gpu.section import Outcome, untimed

PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "matplotlib")


WITH_HOST = "with launches from the host"
"""Note at a time that includes launches from the host, while other times are of CUDA graph
replays."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The measured limits of the device."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    flops_per_s: float
    launch_s: float
    """Seconds of the smallest kernel, averaged over many such kernels in one CUDA graph."""

    @classmethod
    def of(cls, outcome: Outcome) -> "Limits | None":
        """Returns the limits from the rows of the section `limits`; None if one of its rows is
        missing."""
        rows = {row["case"]: row for row in outcome.rows if "seconds" in row}
        if not {limits.COPY, limits.READ, limits.MATRIX, limits.LAUNCH} <= set(rows):
            return None
        copy, read, matrix = rows[limits.COPY], rows[limits.READ], rows[limits.MATRIX]
        return cls(
            copy_bytes_per_s=copy["n_bytes"] / copy["seconds"],
            read_bytes_per_s=read["n_bytes"] / read["seconds"],
            flops_per_s=matrix["n_flops"] / matrix["seconds"],
            launch_s=rows[limits.LAUNCH]["seconds"],
        )

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth that floors assume, in bytes per second: the larger one of the copy and
        the sum."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)

    def floor_s(self, row: Row) -> float:
        """Returns the floor of a row in seconds: the larger of the time to move its bytes and the
        time to do its floating-point operations."""
        n_bytes, n_flops = float(row["n_bytes"]), float(row["n_flops"])
        return max(n_bytes / self.bytes_per_s, n_flops / self.flops_per_s)


def finish(outcome: Outcome, found: Limits | None) -> None:
    """Adds to each row its floor in seconds, and the floor divided by the row's time. Rows without
    a time stay as they are, and so do all rows if `found` is None."""
    for row in outcome.rows:
        if found is not None and "seconds" in row and "n_bytes" in row:
            row["floor_s"] = found.floor_s(row)
            row["of_floor"] = row["floor_s"] / row["seconds"]


def about(device: torch.device, *, is_tiny: bool) -> dict[str, Any]:
    """Returns the description of a measurement: machine, digest of the sources, device, versions of
    packages, and set of operations."""
    return {
        **machine.describe(),
        "sources": sources_digest(),
        "device": device_facts(device),
        "versions": dict(_versions()),
        "operations": name_of(ours(device)),
        "is_tiny": is_tiny,
    }


def device_facts(device: torch.device) -> dict[str, Any]:
    """Returns the device's name and properties, as a dictionary for JSON."""
    if device.type != "cuda":
        return {"name": machine.cpu_name(), "n_threads": torch.get_num_threads()}
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "n_multiprocessors": facts.multi_processor_count,
        "memory_gib": round(facts.total_memory / 2**30, 1),
        "cache_mib": round(facts.L2_cache_size / 2**20, 1),
        "cuda": torch.version.cuda,
    }


def sources_digest() -> str:
    """Returns a digest of all Python sources of the kernels, services and benchmarks. The digest
    identifies the version on machines without the git repository."""
    digest = hashlib.sha256()
    for directory in ("kernels", "services", "benchmarks"):
        for path in sorted((machine.ROOT / directory).rglob("*.py")):
            digest.update(f"{path.relative_to(machine.ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def write(
    path: Path, meta: Mapping[str, Any], found: Limits | None, outcomes: Mapping[str, Outcome]
) -> None:
    """Writes the results of all sections measured so far into the JSON file `path`."""
    contents = {
        "meta": meta,
        "limits": None if found is None else asdict(found),
        "sections": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    path.write_text(json.dumps(contents, indent=1) + "\n")


def table(found: Limits | None, outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yields the lines of the printed table."""
    if found is not None:
        yield (
            f"memory {found.copy_bytes_per_s / 1e9:.0f} GB/s copied, "
            f"{found.read_bytes_per_s / 1e9:.0f} GB/s read, "
            f"matrices {found.flops_per_s / 1e12:.2f} TFLOP/s, "
            f"smallest kernel {1e6 * found.launch_s:.1f} us"
        )
    for name, outcome in outcomes.items():
        yield ""
        said = f": {outcome.error}" if outcome.error else ""
        yield f"{name} ({outcome.status}{said})"
        if outcome.rows:
            yield f"  {'':<46} {'':<26} {'time':>12} {'floor':>12} {'share':>6}  "
        yield from (f"  {_line(row)}" for row in outcome.rows)


def _line(row: Row) -> str:
    start = f"{row['case']:<46} {row.get('version', ''):<26}"
    if "seconds" not in row:
        return f"{start} {untimed(row)}"[:160]
    line = f"{start} {_duration(row['seconds']):>12}"
    if "floor_s" in row:
        line += f" {_duration(row['floor_s']):>12} {100 * row['of_floor']:>5.0f}%"
    for key, text in (
        ("output_tokens_per_s", "{:.0f} output tokens/s"),
        ("tokens_per_s", "{:.0f} tokens/s"),
        ("queued_s", "{:.6f} s queued"),
        ("outside_kernels", "{:.1%} outside kernels"),
    ):
        if key in row:
            line += "  " + text.format(row[key])
    if row.get("is_graph") is False:
        line += f"  {WITH_HOST}"
    if row.get("fits_cache"):
        line += "  fits the cache"
    return line


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.2f} us"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
