"""Writes random matrices in the formats of bitsandbytes, MLX, ModelOpt and FP4, number by number.

As in `quantised_writers.py`, a matrix is made of its numbers and scales, so that what it means is
known exactly, and the loops are slow and short on purpose.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.worker.models.quantised_writers import Writer, Written

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (
    0.0, 0.005208333, 0.6666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
    0.0, -0.005208333, -0.6666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
)  # fmt: skip
E2M1 = (
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
)  # fmt: skip


def in_pairs(numbers: list[int], *, is_upper_first: bool) -> Tensor:
    """Packs numbers of four bits into bytes of two, filled up with a zero."""
    numbers = [*numbers, *[0] * (len(numbers) % 2)]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    packed = [a << 4 | b if is_upper_first else b << 4 | a for a, b in pairs]
    return torch.tensor(packed, dtype=torch.uint8)


def in_words(numbers: Tensor, bits: int) -> Tensor:
    """Packs each row into words of 32 bits, one number after the other from the lowest bit on."""
    rows = []
    for row in numbers.tolist():
        stream = sum(number << (place * bits) for place, number in enumerate(row))
        rows.append(np.frombuffer(stream.to_bytes(len(row) * bits // 8, "little"), dtype=np.uint32))
    return torch.from_numpy(np.stack(rows))


def blockwise(
    kind: str = "nf4",
    *,
    block: int = 64,
    nested_block: int | None = None,
    storage: torch.dtype = torch.uint8,
) -> Writer:
    """Returns a writer of bitsandbytes' four bits; with `nested_block`, double quantisation."""
    values = NF4 if kind == "nf4" else FP4

    def write(n_out: int, n_in: int, generator: torch.Generator) -> Written:
        n = n_out * n_in
        numbers = torch.randint(0, 16, (n,), generator=generator).tolist()
        n_blocks = -(-n // block)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        scales = torch.rand(n_blocks, generator=generator) / 16 + 0.01
        tensors = {"weight.absmax": scales, "weight.quant_map": torch.tensor(values)}
        if nested_block is not None:
            stored = torch.randint(0, 256, (n_blocks,), generator=generator, dtype=torch.uint8)
            outer = torch.rand(-(-n_blocks // nested_block), generator=generator) / 32
            table = torch.linspace(-1, 1, 256)
            scales = torch.tensor([
                float(table[int(code)]) * float(outer[place // nested_block]) + 0.04
                for place, code in enumerate(stored)
            ])  # fmt: skip
            state |= {"nested_blocksize": nested_block, "nested_offset": 0.04}
            state |= {"nested_dtype": "float32"}
            tensors["weight.absmax"] = stored
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": table}
        weights = [values[number] * float(scales[i // block]) for i, number in enumerate(numbers)]
        text = json.dumps(state | {"shape": [n_out, n_in]}).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            list(text), dtype=torch.uint8
        )
        packed = in_pairs(numbers, is_upper_first=True).view(storage)
        tensors["weight"] = packed[:, None]
        return Written(tensors, torch.tensor(weights).view(n_out, n_in))

    return write


def int8_rows() -> Writer:
    """Returns a writer of bitsandbytes' int8."""

    def write(n_out: int, n_in: int, generator: torch.Generator) -> Written:
        numbers = torch.randint(-127, 128, (n_out, n_in), generator=generator, dtype=torch.int8)
        scales = torch.rand(n_out, generator=generator) + 0.1
        rows = [
            [number * float(scale) / 127 for number in row]
            for row, scale in zip(numbers.tolist(), scales, strict=True)
        ]
        tensors = {"weight": numbers, "SCB": scales}
        tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return Written(tensors, torch.tensor(rows))

    return write


def mlx(bits: int, group: int) -> Writer:
    """Returns a writer of MLX's mode "affine"."""

    def write(n_out: int, n_in: int, generator: torch.Generator) -> Written:
        numbers = torch.randint(0, 1 << bits, (n_out, n_in), generator=generator)
        shape = (n_out, n_in // group)
        scales = ((torch.rand(shape, generator=generator) + 0.1) / (1 << bits)).bfloat16()
        biases = (torch.rand(shape, generator=generator) - 0.5).bfloat16()
        weight = torch.tensor([
            [
                number * float(scales[row, column // group]) + float(biases[row, column // group])
                for column, number in enumerate(line)
            ]
            for row, line in enumerate(numbers.tolist())
        ])  # fmt: skip
        tensors = {"weight": in_words(numbers, bits), "scales": scales, "biases": biases}
        return Written(tensors, weight)

    return write


def fp4(layout: str, group: int) -> Writer:
    """Returns a writer of numbers E2M1: "modelopt", "compressed", "mxfp4", "mlx_nvfp4" or
    "mlx_mxfp4"."""

    def write(n_out: int, n_in: int, generator: torch.Generator) -> Written:
        numbers = torch.randint(0, 16, (n_out, n_in), generator=generator)
        shape = (n_out, n_in // group)
        factor = {"modelopt": 0.25, "compressed": 4.0}.get(layout)
        if "mxfp4" in layout:
            stored = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
            scales = torch.tensor([[2.0 ** (e - 127) for e in row] for row in stored.tolist()])
        else:
            stored = (torch.rand(shape, generator=generator) / 4 + 0.02).to(torch.float8_e4m3fn)
            scales = stored.float() * (1.0 if factor is None else 0.25)
        weight = torch.tensor([
            [
                E2M1[number] * float(scales[row, column // group])
                for column, number in enumerate(line)
            ]
            for row, line in enumerate(numbers.tolist())
        ])  # fmt: skip
        pairs = torch.stack([in_pairs(row, is_upper_first=False) for row in numbers.tolist()])
        if layout.startswith("mlx"):
            words = in_words(numbers, 4)
            return Written({"weight": words, "scales": stored.view(torch.uint8)}, weight)
        if layout == "modelopt":
            tensors = {"weight": pairs, "weight_scale_2": torch.tensor(factor)}
            tensors["input_scale"] = torch.tensor(0.5)
        else:
            tensors = {"weight_packed": pairs}
        if layout == "compressed":
            tensors["weight_global_scale"] = torch.tensor([factor])
        return Written(tensors | {"weight_scale": stored}, weight)

    return write
