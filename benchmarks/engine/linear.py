"""Measures linear layers in each form that weights can have: GFLOP/s for each shape and batch.

    python -m benchmarks.engine.linear [--dtype bfloat16] [--threads 2]

Each form multiplies with several copies of a matrix in turn, more than 100 MB together, so that the
weights come from memory as in a model. The forms take turns and the fastest round of each counts.
The shapes are of `benchmarks.make_model`'s llama-125m.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from kernels.native.linear import NativeWeight, can_pack
from kernels.packing.linear import pack
from kernels.pytorch.linear import OneDnnWeight
from kernels.weights.linear import LinearWeight, PlainWeight

SHAPES = [(768, 1280), (768, 768), (768, 4096), (2048, 768), (768, 32000)]  # n_in, n_out
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
COLD_BYTES = 100 << 20
FORMS: dict[str, Callable[[Tensor], LinearWeight]] = {
    "plain": PlainWeight,
    "onednn": OneDnnWeight.of,
    "native": NativeWeight.of,
    "int8": partial(pack, quantization="int8"),
    "int4": partial(pack, quantization="int4"),
}


def seconds_of(weights: list[LinearWeight], x: Tensor) -> float:
    """Multiplies `x` by each of `weights` once, and returns the mean seconds per product."""
    start = time.perf_counter()
    for weight in weights:
        weight(x)
    return (time.perf_counter() - start) / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    forms = {
        name: form
        for name, form in FORMS.items()
        if name in ("plain", "onednn") or can_pack(torch.empty(1, 1, dtype=dtype))
    }
    print(f"{'shape':<14}{'tokens':>7}", *(f"{name:>8}" for name in forms))
    for n_in, n_out in tqdm(SHAPES, leave=False):
        n_copies = max(2, -(-COLD_BYTES // (n_in * n_out * dtype.itemsize)))
        plain = [torch.randn(n_out, n_in).mul_(0.02).to(dtype) for _ in range(n_copies)]
        weights = {name: [form(weight) for weight in plain] for name, form in forms.items()}
        for n_tokens in BATCHES:
            x = torch.randn(n_tokens, n_in).to(dtype)
            best = dict.fromkeys(forms, float("inf"))
            for _ in range(arguments.rounds):
                for name in forms:
                    best[name] = min(best[name], seconds_of(weights[name], x))
            rates = [2e-9 * n_tokens * n_in * n_out / seconds for seconds in best.values()]
            shape = f"{n_in}x{n_out}"
            tqdm.write(f"{shape:<14}{n_tokens:>7} " + " ".join(f"{rate:>8.0f}" for rate in rates))


if __name__ == "__main__":
    main()
