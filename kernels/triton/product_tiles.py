"""The division of products with quantised weights into tiles and parts of the inputs.

The output of a product is divided into tiles of outputs and tokens. If there are too few tiles to
occupy the GPU, the inputs are divided into parts as well, whose sums are added afterwards
(split-K).

The tiles depend on the number of tokens (up to 16, 32, 64, or more), on the sizes of the matrix, on
whether the product is gated, and on the element type. If `python -m kernels.triton.tune --int8` has
measured such a product on a device of this name, the fastest tiles are used, otherwise default
tiles. The number of parts follows from the tiles and the device's number of multiprocessors. A
division does not depend on the values in the matrices, and is cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from kernels.triton.tuning import Device, measured

MAX_DIVIDED = 512
"""Largest number of tiles of a product for which the inputs of a tile may be divided among
programs. With more tiles, one program computes each tile."""

MAX_TOKENS = 128
"""Largest number of tokens of a tile."""

_MIN_TOKENS = 16  # minimum number of tokens of a tile
_MIN_STEPS = 4  # minimum number of steps of a part, whose sums must be written and read


@dataclass(frozen=True, slots=True)
class Product:
    """A kind of product with a quantised matrix: the sizes of the matrix, whether there is a gate,
    and the element type of tokens. The number of tokens is not included."""

    n_out: int  # if gated, number of outputs of each of the two matrices
    n_in: int
    is_gated: bool
    dtype: torch.dtype  # element type of tokens


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tile size of a product, and the numbers of programs, warps and pipeline stages that
    compute the tiles."""

    tokens: int
    outputs: int  # if gated, number of outputs of each of the two matrices
    inputs: int  # inputs of one step
    n_programs: int  # inputs are divided up to this number of programs per multiprocessor; 0: never
    n_warps: int
    n_stages: int  # stages of the software pipeline over steps


@dataclass(frozen=True, slots=True)
class ProductCut:
    """The division of a product: its tiles, and the number of parts into which the inputs of each
    tile are divided."""

    tiles: ProductTiles
    n_tiles: int  # number of tiles of outputs and tokens
    n_parts: int  # number of parts of the inputs, equal for all tiles
    n_steps: int  # number of steps of a part


# Keys are the bytes of an element, whether the product is gated, and the number of tokens. A stage
# takes shared memory for `outputs * inputs` bytes of weights, twice that if gated, and for
# `tokens * inputs` elements of tokens. With few tokens about 40 KiB are being loaded at any time.
# In float32, products do not use matrix units, and threads hold the operands in registers.
_DEFAULTS = {
    (2, False, 16): ProductTiles(16, 64, 128, n_programs=2, n_warps=4, n_stages=5),
    (2, False, 32): ProductTiles(32, 64, 128, n_programs=2, n_warps=4, n_stages=4),
    (2, False, 64): ProductTiles(64, 128, 128, n_programs=1, n_warps=8, n_stages=3),
    (2, False, 128): ProductTiles(128, 128, 64, n_programs=1, n_warps=8, n_stages=4),
    (2, True, 16): ProductTiles(16, 64, 128, n_programs=2, n_warps=4, n_stages=4),
    (2, True, 32): ProductTiles(32, 64, 128, n_programs=2, n_warps=4, n_stages=4),
    (2, True, 64): ProductTiles(64, 64, 128, n_programs=1, n_warps=8, n_stages=3),
    (2, True, 128): ProductTiles(128, 64, 64, n_programs=1, n_warps=8, n_stages=4),
    (4, False, 16): ProductTiles(16, 32, 32, n_programs=2, n_warps=4, n_stages=3),
    (4, False, 32): ProductTiles(32, 32, 32, n_programs=2, n_warps=4, n_stages=3),
    (4, False, 64): ProductTiles(32, 64, 32, n_programs=1, n_warps=4, n_stages=3),
    (4, False, 128): ProductTiles(32, 64, 32, n_programs=1, n_warps=4, n_stages=3),
    (4, True, 16): ProductTiles(16, 32, 32, n_programs=2, n_warps=4, n_stages=3),
    (4, True, 32): ProductTiles(32, 32, 32, n_programs=2, n_warps=4, n_stages=3),
    (4, True, 64): ProductTiles(32, 32, 32, n_programs=1, n_warps=4, n_stages=3),
    (4, True, 128): ProductTiles(32, 32, 32, n_programs=1, n_warps=4, n_stages=3),
}


@cache
def cut_product(product: Product, n_tokens: int, device: Device) -> ProductCut:
    """Returns the division of `product` into tiles for `n_tokens` tokens, at least one, on
    `device`."""
    found = measured(device.name).get(entry(product, n_tokens))
    tiles = ProductTiles(**found) if found else default_tiles(product, n_tokens)
    return cut_with(tiles, product, n_tokens, device)


def cut_with(tiles: ProductTiles, product: Product, n_tokens: int, device: Device) -> ProductCut:
    """Returns the division of `product` for `n_tokens` tokens on `device`, with tiles of the given
    size."""
    n_tiles = triton.cdiv(product.n_out, tiles.outputs) * triton.cdiv(n_tokens, tiles.tokens)
    n_steps = triton.cdiv(product.n_in, tiles.inputs)
    n_parts = 1
    if n_tiles <= MAX_DIVIDED:
        n_wanted = tiles.n_programs * device.n_multiprocessors // n_tiles
        n_parts = max(1, min(n_wanted, n_steps // _MIN_STEPS))
        if n_tokens > tiles.tokens:
            # Only powers of two, so that a warm-up with powers of two of tokens compiles all
            # variants.
            n_parts = 1 << (n_parts.bit_length() - 1)
    n_steps = triton.cdiv(n_steps, n_parts)
    return ProductCut(tiles, n_tiles, triton.cdiv(product.n_in, n_steps * tiles.inputs), n_steps)


def default_tiles(product: Product, n_tokens: int) -> ProductTiles:
    """Returns the default tiles, which are used for a product that was not measured. They need at
    most 99 KiB of shared memory."""
    return _DEFAULTS[product.dtype.itemsize, product.is_gated, tokens_up_to(n_tokens)]


def tokens_up_to(n_tokens: int) -> int:
    """Rounds `n_tokens` up to the next power of two, at least 16 and at most MAX_TOKENS. Measured
    tiles are stored under this number."""
    return min(MAX_TOKENS, max(_MIN_TOKENS, 1 << (n_tokens - 1).bit_length()))


def entry(product: Product, n_tokens: int) -> str:
    """Returns the key under which the fastest tiles of a product are stored in the file of
    measurements."""
    kind = "int8 gated" if product.is_gated else "int8"
    dtype = str(product.dtype).removeprefix("torch.")
    return f"{kind} {product.n_out}x{product.n_in} {tokens_up_to(n_tokens)} {dtype}"
