"""How products with quantised weights are cut on a device: tiles, and parts of the inputs.

Tiles are by how many tokens there are, up to 16, 32, 64, or more. They are what
`python -m kernels.triton.tune --int8` has measured for just this matrix on a device of the same
name, if it has, and else a default. How many parts the inputs are divided into follows from the
tiles and the number of multiprocessors. All of it depends on shapes alone and is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from kernels.triton.tuning import Device, measured

MAX_DIVIDED = 512
"""Tiles of a product whose inputs are divided, at most."""

MAX_TOKENS = 128
"""Tokens of a tile, at most."""

_MIN_TOKENS = 16  # of a tile
_MIN_STEPS = 4  # of a part, which must be worth that its sums are written and read


@dataclass(frozen=True, slots=True)
class Product:
    """The shape and the types of a product, without the number of tokens."""

    n_out: int  # gated, of each of both matrices
    n_in: int
    is_gated: bool
    dtype: torch.dtype  # of tokens


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tile that a program works on."""

    tokens: int
    outputs: int  # gated, of each of both matrices
    inputs: int  # of one step
    n_programs: int  # of a multiprocessor, up to which inputs are divided; with 0 they are not
    n_warps: int
    n_stages: int  # of the software pipeline over steps


@dataclass(frozen=True, slots=True)
class ProductCut:
    """How a product is cut: its tiles, and the parts of their inputs."""

    tiles: ProductTiles
    n_tiles: int  # of outputs times tokens
    n_parts: int  # of the inputs, for each tile
    n_steps: int  # of a part


# By bytes of an element, whether there are two matrices, and tokens. Shared memory for a step are
# `outputs * inputs` bytes, gated twice that, and the tokens' `tokens * inputs` elements; of few
# tokens, some 40 KiB are on their way at any time. Of float32, whose products are exact, threads
# have the operands themselves.
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
    """Returns how `product` with `n_tokens` tokens, one or more, is cut on `device`."""
    found = measured(device.name).get(entry(product, n_tokens))
    tiles = ProductTiles(**found) if found else default_tiles(product, n_tokens)
    return cut_with(tiles, product, n_tokens, device)


def cut_with(tiles: ProductTiles, product: Product, n_tokens: int, device: Device) -> ProductCut:
    """Returns how `product` is cut into the given tiles."""
    n_tiles = triton.cdiv(product.n_out, tiles.outputs) * triton.cdiv(n_tokens, tiles.tokens)
    n_steps = triton.cdiv(product.n_in, tiles.inputs)
    n_parts = 1
    if n_tiles <= MAX_DIVIDED:
        n_wanted = tiles.n_programs * device.n_multiprocessors // n_tiles
        n_parts = max(1, min(n_wanted, n_steps // _MIN_STEPS))
        if n_tokens > tiles.tokens:
            # Powers of two, so that what a warm-up with powers of two tokens compiles is all.
            n_parts = 1 << (n_parts.bit_length() - 1)
    n_steps = triton.cdiv(n_steps, n_parts)
    return ProductCut(tiles, n_tiles, triton.cdiv(product.n_in, n_steps * tiles.inputs), n_steps)


def default_tiles(product: Product, n_tokens: int) -> ProductTiles:
    """Returns tiles that were chosen and not measured, for 99 KiB of shared memory and more."""
    return _DEFAULTS[product.dtype.itemsize, product.is_gated, tokens_up_to(n_tokens)]


def tokens_up_to(n_tokens: int) -> int:
    """Returns the number of tokens for which tiles are chosen where there are `n_tokens`."""
    return min(MAX_TOKENS, max(_MIN_TOKENS, 1 << (n_tokens - 1).bit_length()))


def entry(product: Product, n_tokens: int) -> str:
    """Returns the name of a measurement in its file."""
    kind = "int8 gated" if product.is_gated else "int8"
    dtype = str(product.dtype).removeprefix("torch.")
    return f"{kind} {product.n_out}x{product.n_in} {tokens_up_to(n_tokens)} {dtype}"
