"""The limits of the device: memory bandwidth, rate of matrix products, time of a small kernel.

A copy reads and writes memory. A sum only reads memory, as attention over many keys does. The
bandwidths of the two may differ.
"""

from functools import partial

import torch

from benchmarks.gpu.bench import Bench

COPY, READ, MATRIX, LAUNCH = "copy", "sum", "matrix product", "smallest kernel"
"""Names of the measured cases. The report finds the limits by these names."""


def measure(bench: Bench) -> None:
    """Measures the limits of the device and writes a row for each."""
    scale, device = bench.scale, bench.device
    source = torch.randn(scale.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    timing = bench.timer.time([partial(target.copy_, source)], is_capturable=False)
    n_bytes = 2 * source.nbytes  # read and written
    bench.emit({"case": COPY, "seconds": timing.device_s, "n_bytes": n_bytes, "n_flops": 0})
    part = source[: len(source) // 4]  # PyTorch would divide a sum over more than 2 GiB
    timing = bench.timer.time([partial(torch.sum, part)], is_capturable=False)
    bench.emit({"case": READ, "seconds": timing.device_s, "n_bytes": part.nbytes, "n_flops": 0})
    del source, target, part

    size = scale.matrix_size
    a, b = torch.randn(2, size, size, device=device).to(bench.dtype)
    timing = bench.timer.time([partial(torch.matmul, a, b)], is_capturable=False)
    bench.emit(
        {
            "case": MATRIX,
            "seconds": timing.device_s,
            "n_bytes": 3 * a.nbytes,
            "n_flops": 2 * size**3,
        }
    )

    one = torch.zeros(1, device=device)
    timing = bench.timer.time([partial(one.add_, 1)])
    bench.emit(
        {
            "case": LAUNCH,
            "seconds": timing.device_s,
            "call_s": timing.call_s,
            "n_bytes": 8,
            "n_flops": 0,
        }
    )
