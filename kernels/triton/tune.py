"""Measures which tiles are fastest on this device: `python -m kernels.triton.tune`.

For each head size and element type the program times attention with every candidate, over a batch
of decodes and over a batch of prompts and chunks. It saves the fastest tiles in the file that
`kernels.triton.tuning` reads, so that processes that start later use them. The heads and batches
are typical of common models. Other models can use the results, because only the order of the
candidates matters. Products with int8 weights are measured for the given sizes of matrices, for
each number of tokens that has tiles of its own:

    python -m kernels.triton.tune --int8 6144x4096 4096x4096 4096x14336 --int8-gated 14336x4096
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

from kernels.triton import product_tiles
from kernels.triton.attention import attention
from kernels.triton.attention_plan import Cut, cut_batch, cut_for
from kernels.triton.linear_int8 import Int8Matrix
from kernels.triton.product_tiles import Product, ProductTiles, cut_with
from kernels.triton.quantised_product import multiply
from kernels.triton.tuning import Device, Kind, Tiles, device_of, entry, save
from kernels.upload import uploads_for

_logger = logging.getLogger(__name__)

_N_KV_HEADS = 8
_GROUP_SIZE = 4
_BLOCK_SIZE = 16

# For each span, the number of tokens stored before the span, and the number of tokens of the span.
_BATCHES = {
    Kind.DECODES: [(8191, 1)] * 32 + [(1000, 1)] * 32,
    Kind.SPANS: [(0, 4096), (6000, 2048), (0, 700)],
}
_CANDIDATES = {
    Kind.DECODES: ([16], [16, 32, 64, 128], [2, 4, 8], [2, 3, 4]),
    Kind.SPANS: ([32, 64, 128], [16, 32, 64, 128], [4, 8], [2, 3, 4]),
}
# Numbers of tokens with which a product is measured, one for each choice of tiles.
_TOKENS = [16, 32, 64, 2048]
# Candidates for products: outputs, inputs of a step, programs per multiprocessor, warps, stages.
_FEW = ([64, 128], [128, 256], [1, 2, 4], [4], [3, 5])
_MANY = ([64, 128, 256], [64, 128], [1], [4, 8], [3, 4])

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def candidates(kind: Kind) -> Iterator[Tiles]:
    """Yields all tile sizes to measure. Some of them may not fit the device."""
    for rows, keys, n_warps, n_stages in itertools.product(*_CANDIDATES[kind]):
        yield Tiles(rows, keys, n_warps=n_warps, n_stages=n_stages)


def with_tiles(cut: Cut, kind: Kind, tiles: Tiles) -> Cut:
    """Returns a copy of `cut`, the parameters by which a batch is divided into items of work, in
    which work of the kind `kind` has the tile sizes `tiles`."""
    return replace(cut, small=tiles) if kind is Kind.DECODES else replace(cut, large=tiles)


class AttentionBench:
    """Measures the speed of attention over a batch of one kind, with random keys and values."""

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
        """Returns the median time of a call with `tiles` in milliseconds, or infinity if the tiles
        do not fit the device."""
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
    """Measures all candidates and returns the fastest tile sizes for attention work of the given
    kind."""
    bench = AttentionBench(kind, head_dim, dtype, device)
    times = {tiles: bench.time_ms(tiles) for tiles in candidates(kind)}
    best = min(times, key=times.__getitem__)
    _logger.info("%s: %s, %.3f ms", entry(kind, head_dim, dtype), best, times[best])
    return best


def product_candidates(n_tokens: int, dtype: torch.dtype) -> Iterator[ProductTiles]:
    """Yields all tile sizes to measure for a product with `n_tokens` tokens."""
    tokens = product_tiles.tokens_up_to(n_tokens)
    sizes = _MANY if tokens == product_tiles.MAX_TOKENS else _FEW
    for outputs, inputs, n_programs, n_warps, n_stages in itertools.product(*sizes):
        tiles = ProductTiles(
            tokens, outputs, inputs, n_programs=n_programs, n_warps=n_warps, n_stages=n_stages
        )
        if dtype == torch.float32:  # threads hold the operands in registers
            tiles = replace(tiles, tokens=min(tokens, 32), outputs=outputs // 2, inputs=inputs // 4)
        yield tiles


class ProductBench:
    """Measures the speed of a product of random tokens with a random matrix that is not in the
    cache."""

    def __init__(self, product: Product, n_tokens: int, device: Device) -> None:
        self._product, self._device = product, device
        n_rows = product.n_out * (2 if product.is_gated else 1)
        weight = torch.randn(n_rows, product.n_in, dtype=product.dtype, device="cuda")
        self._matrix = Int8Matrix.of(weight)
        self._x = torch.randn(n_tokens, product.n_in, dtype=product.dtype, device="cuda")
        self._out = self._x.new_empty(n_tokens, product.n_out)

    def time_ms(self, tiles: ProductTiles) -> float:
        """Returns the median time of a call with `tiles` in milliseconds, or infinity if the tiles
        do not fit the device."""
        cut = cut_with(tiles, self._product, len(self._x), self._device)
        gate = int(self._product.is_gated)
        try:
            time_ms = triton.testing.do_bench(
                lambda: multiply(
                    self._matrix, self._x, None, self._out, cut, gate=gate, has_residual=False
                ),
                return_mode="median",
            )
        except OutOfResources:
            return float("inf")
        return float(time_ms)


def fastest_product(product: Product, n_tokens: int, device: Device) -> ProductTiles:
    """Measures all candidates and returns the fastest tiles for `product`."""
    bench = ProductBench(product, n_tokens, device)
    times = {tiles: bench.time_ms(tiles) for tiles in product_candidates(n_tokens, product.dtype)}
    best = min(times, key=times.__getitem__)
    name = product_tiles.entry(product, n_tokens)
    _logger.info("%s: %s, %.3f ms", name, best, times[best])
    return best


def _matrix_size(text: str) -> tuple[int, int]:
    n_out, n_in = map(int, text.split("x"))
    return n_out, n_in


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 128], metavar="SIZE")
    parser.add_argument(
        "--int8", type=_matrix_size, nargs="+", default=[], metavar="OUTxIN", help="of a rank"
    )
    parser.add_argument(
        "--int8-gated",
        type=_matrix_size,
        nargs="+",
        default=[],
        metavar="OUTxIN",
        help="of a rank, each of both matrices of this size",
    )
    parser.add_argument("--dtype", nargs="+", choices=_TYPES, default=["bfloat16"])
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to measure")
    device = device_of(torch.device("cuda"))
    for head_dim, name, kind in itertools.product(options.head_dim, options.dtype, Kind):
        dtype = _TYPES[name]
        best = fastest(kind, head_dim, dtype, device)
        _keep(device, entry(kind, head_dim, dtype), best)
    sizes = [(size, False) for size in options.int8] + [(size, True) for size in options.int8_gated]
    for (size, is_gated), name, n_tokens in itertools.product(sizes, options.dtype, _TOKENS):
        n_out, n_in = size
        product = Product(n_out, n_in, is_gated=is_gated, dtype=_TYPES[name])
        best_tiles = fastest_product(product, n_tokens, device)
        _keep(device, product_tiles.entry(product, n_tokens), best_tiles)


def _keep(device: Device, name: str, tiles: Tiles | ProductTiles) -> None:
    path = save(device.name, {name: tiles})
    _logger.info("kept in %s", path)


if __name__ == "__main__":
    main()
