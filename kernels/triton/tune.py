"""Measures which tiles attention is fastest with on this device: `python -m kernels.triton.tune`.

For each head size and element type it times a batch of decodes and a batch of prompts and chunks
with every candidate, and keeps the fastest where `kernels.triton.tuning` looks for it: processes
that start later use it. Heads and batch are those of a common model; only the order of the
candidates matters.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import triton
from triton.runtime.errors import OutOfResources

from kernels.triton.attention import attention
from kernels.triton.attention_plan import Cut, cut_batch, cut_for
from kernels.triton.tuning import Device, Kind, Tiles, device_of, entry, save
from kernels.upload import uploads_for

_logger = logging.getLogger(__name__)

_N_KV_HEADS = 8
_GROUP_SIZE = 4
_BLOCK_SIZE = 16

# (tokens stored before, tokens in the batch) of each span.
_BATCHES = {
    Kind.DECODES: [(8191, 1)] * 32 + [(1000, 1)] * 32,
    Kind.SPANS: [(0, 4096), (6000, 2048), (0, 700)],
}
_CANDIDATES = {
    Kind.DECODES: ([16], [16, 32, 64, 128], [2, 4, 8], [2, 3, 4]),
    Kind.SPANS: ([32, 64, 128], [16, 32, 64, 128], [4, 8], [2, 3, 4]),
}
_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def candidates(kind: Kind) -> Iterator[Tiles]:
    """Everything that is tried; what does not fit the device is left out there."""
    for rows, keys, n_warps, n_stages in itertools.product(*_CANDIDATES[kind]):
        yield Tiles(rows, keys, n_warps=n_warps, n_stages=n_stages)


def with_tiles(cut: Cut, kind: Kind, tiles: Tiles) -> Cut:
    """`cut` with `tiles` for items of `kind`."""
    return replace(cut, small=tiles) if kind is Kind.DECODES else replace(cut, large=tiles)


class Bench:
    """The batch of one kind over random storage."""

    def __init__(self, kind: Kind, head_dim: int, dtype: torch.dtype, device: Device) -> None:
        self._kind = kind
        self._starts, self._n_tokens = np.array(_BATCHES[kind]).T
        self._cut = cut_for(_GROUP_SIZE, _N_KV_HEADS, head_dim, dtype, device)
        n_blocks = -(-(self._starts + self._n_tokens) // _BLOCK_SIZE)
        ids = np.random.default_rng(0).permutation(n_blocks.sum())
        self._tables = np.zeros((len(n_blocks), n_blocks.max()), np.int64)
        self._tables[np.arange(n_blocks.max()) < n_blocks[:, None]] = ids
        shape = (len(ids), _BLOCK_SIZE, _N_KV_HEADS, head_dim)
        self._keys, self._values = torch.randn((2, *shape), dtype=dtype, device="cuda")
        n_heads = _N_KV_HEADS * _GROUP_SIZE
        n_tokens = int(self._n_tokens.sum())
        self._q = torch.randn(n_tokens, n_heads, head_dim, dtype=dtype, device="cuda")

    def time_ms(self, tiles: Tiles) -> float:
        """Milliseconds of a call with `tiles`; infinite where they do not fit the device."""
        uploads = uploads_for(self._q.device)
        plan = cut_batch(
            self._starts,
            self._n_tokens,
            block_tables=self._tables,
            block_size=_BLOCK_SIZE,
            windows=(None,),
            cut=with_tiles(self._cut, self._kind, tiles),
            uploads=uploads,
            has_fixed_shape=False,
        )
        uploads.flush()
        try:
            time_ms = triton.testing.do_bench(
                lambda: attention(self._q, self._keys, self._values, plan), return_mode="median"
            )
        except OutOfResources:
            return float("inf")
        return float(time_ms)


def fastest(kind: Kind, head_dim: int, dtype: torch.dtype, device: Device) -> Tiles:
    """The best of the candidates by measurement."""
    bench = Bench(kind, head_dim, dtype, device)
    times = {tiles: bench.time_ms(tiles) for tiles in candidates(kind)}
    best = min(times, key=times.__getitem__)
    _logger.info("%s: %s, %.3f ms", entry(kind, head_dim, dtype), best, times[best])
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], metavar="SIZE")
    parser.add_argument("--dtype", nargs="+", choices=_TYPES, default=["bfloat16"])
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to measure")
    device = device_of(torch.device("cuda"))
    for head_dim, name, kind in itertools.product(options.head_dim, options.dtype, Kind):
        dtype = _TYPES[name]
        best = fastest(kind, head_dim, dtype, device)
        path = save(device.name, {entry(kind, head_dim, dtype): best})
    _logger.info("kept in %s", path)


if __name__ == "__main__":
    main()
