"""Runs the sections of the GPU benchmark, writes `gpu.json` and `gpu.png`, and prints a table.

The exit status is 1 if a section failed or ran out of time; the rows measured until then are kept.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import benchmarks.gpu
from benchmarks.gpu import report, section
from benchmarks.gpu.bench import progress
from benchmarks.gpu.report import Limits
from benchmarks.gpu.section import SECTIONS, Outcome

JSON, PNG = "gpu.json", "gpu.png"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--only",
        type=names,
        default=list(SECTIONS),
        metavar="NAME,NAME",
        help=f"sections, of {', '.join(SECTIONS)}; limits are always measured",
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see whether it runs")
    options = parser.parse_args()
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device; --tiny --device cpu shows whether the benchmark runs"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    meta = report.about(options.device, is_tiny=options.tiny)
    outcomes: dict[str, Outcome] = {}
    found = None
    for name in SECTIONS:
        if name != "limits" and name not in options.only:
            continue
        rows = options.out / f"{name}.jsonl"
        rows.unlink(missing_ok=True)
        outcomes[name] = section.run(name, rows, device=options.device, is_tiny=options.tiny)
        found = found or Limits.of(outcomes[name])
        report.finish(outcomes[name], found)
        report.write(options.out / JSON, meta, found, outcomes)
        rows.unlink(missing_ok=True)
    _draw(options.out / PNG, outcomes, meta)
    print("\n".join(report.table(found, outcomes)))
    return int(not all(outcome.is_good for outcome in outcomes.values()))


def _draw(path: Path, outcomes: dict[str, Outcome], meta: dict[str, object]) -> None:
    if find_spec("matplotlib") is None:
        progress(f"no {path.name}: matplotlib is not installed")
        return
    from benchmarks.gpu import figures

    figures.draw(path, outcomes, meta)


def names(text: str) -> list[str]:
    names = text.split(",")
    unknown = set(names) - set(SECTIONS)
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no section {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    sys.exit(main())
