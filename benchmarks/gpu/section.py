"""Runs the sections of the GPU benchmark one at a time, so that a section that fails or hangs does
not stop the others.

On a GPU a section has a process of its own: after an illegal access, a process cannot use the GPU
any more, and a kernel that hangs ends only with its process. A section writes each row as a line at
once, so that its rows are kept when its process is killed.

    python -m benchmarks.gpu.section NAME --rows FILE --limit-s SECONDS [--tiny] [--device cpu]
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import torch

from benchmarks.gpu.bench import OURS, Bench, Row, progress
from benchmarks.gpu.shapes import FULL, TINY

MARGIN_S = 8.0
"""A section begins no further measurement in this number of seconds before its time limit."""

MAX_DIFFERENCE = 0.03
"""Largest relative difference of a version's result from the first version's result that bfloat16
rounding can explain."""

FAILURE = "failure"
"""Key of the last line of a section that failed. Its value is the error."""


@dataclass(frozen=True, slots=True)
class Section:
    """The module of a section, and the limit of its time in seconds."""

    module: str
    limit_s: float
    needs: str | None = None
    """Package that the section needs; without the package, the section is skipped."""


SECTIONS = {
    "limits": Section("benchmarks.gpu.limits", 30),
    "attention": Section("benchmarks.gpu.attention", 85),
    "operations": Section("benchmarks.gpu.operations", 75),
    "engine": Section("benchmarks.gpu.engine", 125),
    "serving": Section("benchmarks.gpu.serving", 70),
    "transformers": Section("benchmarks.gpu.transformers_model", 90, needs="transformers"),
}


@dataclass(slots=True)
class Outcome:
    """The result of a section: status, error, duration and rows."""

    status: str = "ok"
    """`ok`, `failed`, `incomplete` (the time limit was reached) or `skipped` (a package is
    missing)."""
    error: str | None = None
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether the section is complete, or was skipped because its package is missing."""
        return self.status in ("ok", "skipped")


def run(name: str, rows: Path, *, device: torch.device, is_tiny: bool) -> Outcome:
    """Measures a section and returns its outcome; the rows are kept in the file `rows`."""
    section = SECTIONS[name]
    if section.needs is not None and find_spec(section.needs) is None:
        return Outcome("skipped", f"{section.needs} is not installed")
    progress(f"{name}: at most {section.limit_s:g} s")
    start = time.monotonic()
    error = None
    if device.type == "cuda":
        error = in_process(name, rows, device=device, is_tiny=is_tiny)
    else:
        measure(name, rows, device=device, is_tiny=is_tiny, limit_s=section.limit_s)
    outcome = outcome_of(read(rows), error)
    outcome.seconds = time.monotonic() - start
    said = f" ({outcome.error})" if outcome.error else ""
    progress(f"{name}: {outcome.status}{said}, {outcome.seconds:.1f} s")
    return outcome


def outcome_of(rows: list[Row], error: str | None) -> Outcome:
    """Returns the outcome of a section with these rows. `error` is the error of its process, or
    None."""
    failures = [row[FAILURE] for row in rows if FAILURE in row]
    rows = [row for row in rows if FAILURE not in row]
    ours = [row for row in rows if "error" in row and row["version"].startswith(OURS)]
    if error is not None or failures:
        return Outcome("failed", error or failures[0], rows=rows)
    if ours:
        return Outcome("failed", f"{len(ours)} rows, first {ours[0]['error']}", rows=rows)
    far = [row["case"] for row in rows if is_far(row)]
    if far:
        return Outcome("failed", f"versions differ in {len(far)} cases, first {far[0]}", rows=rows)
    if any(row.get("skipped") == Bench.OUT_OF_TIME for row in rows):
        return Outcome("incomplete", Bench.OUT_OF_TIME, rows=rows)
    return Outcome(rows=rows)


def is_far(row: Row) -> bool:
    """Returns whether a version's result differs from the first version's by more than rounding
    explains."""
    return (
        row.get("difference", 0) > MAX_DIFFERENCE
        or row.get("n_different", 0) > row.get("max_different", 0)
        or not row.get("tokens_equal", True)
    )


def measure(name: str, rows: Path, *, device: torch.device, is_tiny: bool, limit_s: float) -> None:
    """Measures a section in this process. If the section fails, a line of `rows` has the error."""
    with rows.open("w") as file:

        def emit(row: Row) -> None:
            _write(file, row)
            progress(f"  {_told(row)}")

        bench = Bench(
            device,
            TINY if is_tiny else FULL,
            ends_at=time.monotonic() + limit_s - MARGIN_S,
            emit=emit,
        )
        try:
            with torch.no_grad():
                importlib.import_module(SECTIONS[name].module).measure(bench)
        except Exception as error:  # noqa: BLE001 — the sections after it may work
            traceback.print_exc()
            _write(file, {FAILURE: f"{type(error).__name__}: {error}"})


def in_process(name: str, rows: Path, *, device: torch.device, is_tiny: bool) -> str | None:
    """Measures a section in a new process, which is killed at the section's time limit. Returns the
    error of the process, or None."""
    limit_s = SECTIONS[name].limit_s
    command = [sys.executable, "-m", "benchmarks.gpu.section", name, f"--rows={rows}"]
    command += [f"--device={device}", f"--limit-s={limit_s}", *(["--tiny"] if is_tiny else [])]
    try:
        code = subprocess.run(command, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"was ended after {limit_s:g} s"
    return f"its process ended with code {code}" if code else None


def read(rows: Path) -> list[Row]:
    """Returns the rows that a section has written so far; an empty list if the file is missing."""
    if not rows.exists():
        return []
    # The last line is incomplete if its writer was ended.
    return [
        json.loads(line) for line in rows.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def untimed(row: Row) -> str:
    """Returns the text for a row that has no time: the result of a comparison, or why there is no
    time."""
    if "tokens_equal" in row:
        return "equal" if row["tokens_equal"] else "not equal"
    return str(row.get("error") or row.get("skipped") or "done")


def _write(file: IO[str], row: Row) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()


def _told(row: Row) -> str:
    name = " · ".join(str(row[key]) for key in ("case", "version") if key in row)
    if "seconds" in row:
        return f"{name}: {1e6 * row['seconds']:.1f} us"
    return f"{name}: {untimed(row)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures one section in this process.")
    parser.add_argument("name", choices=SECTIONS)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    measure(
        options.name,
        options.rows,
        device=options.device,
        is_tiny=options.tiny,
        limit_s=options.limit_s,
    )


if __name__ == "__main__":
    main()
