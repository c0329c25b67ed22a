"""A section that measures something, and then fails."""

from benchmarks.gpu.bench import Bench


def measure(bench: Bench) -> None:
    bench.emit({"case": "before", "version": "ours", "seconds": 1.0})
    bench.emit({"case": "never", "version": "ours", "seconds": 1 / 0})
