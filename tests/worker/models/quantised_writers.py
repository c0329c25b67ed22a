"""Writes random quantised matrices, each format number by number as its specification says.

A matrix is made of its numbers, zero points and scales, so that what it means is known exactly. The
loops are slow and short on purpose: they are what the reading is held to.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that each nibble of a word is of


@dataclass(frozen=True)
class Written:
    """The tensors of a module by the ends of their names, and the matrix that they mean."""

    tensors: dict[str, Tensor]
    weight: Tensor


Writer = Callable[[int, int, torch.Generator], Written]  # of n_out, n_in


def as_words(numbers: list[int], bits: int) -> list[int]:
    """Returns signed words of 32 bits with the numbers, the first in the lowest bits."""
    stream = sum(number << (place * bits) for place, number in enumerate(numbers))
    words = [stream >> begin & 0xFFFFFFFF for begin in range(0, len(numbers) * bits, 32)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


def pack_rows(numbers: Tensor, bits: int) -> Tensor:
    """Packs along the second dimension, filled up with zeros."""
    n = 32 if 32 % bits else 32 // bits
    rows = [row + [0] * (-len(row) % n) for row in numbers.tolist()]
    return torch.tensor([as_words(row, bits) for row in rows], dtype=torch.int32)


@dataclass(frozen=True)
class Grouped:
    """Numbers [n_out, n_in], and zero points and scales [n_out, n_groups] of groups of inputs."""

    numbers: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor  # [n_in]

    @property
    def weight(self) -> Tensor:
        """The matrix, element by element."""
        groups = self.groups.tolist()
        rows = [
            [
                (number - zeros[group]) * scales[group]
                for number, group in zip(numbers, groups, strict=True)
            ]
            for numbers, zeros, scales in zip(
                self.numbers.tolist(), self.zeros.tolist(), self.scales.tolist(), strict=True
            )
        ]
        return torch.tensor(rows)


def draw(
    n_out: int,
    n_in: int,
    generator: torch.Generator,
    *,
    bits: int,
    group_size: int | None,
    is_symmetric: bool,
    is_ordered: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Grouped:
    """Draws a matrix; ordered, inputs of a group are anywhere."""
    size = group_size or n_in
    n_groups = -(-n_in // size)
    numbers = torch.randint(0, 1 << bits, (n_out, n_in), generator=generator)
    zeros = torch.randint(1, 1 << bits, (n_out, n_groups), generator=generator)
    if is_symmetric:
        zeros.fill_(1 << bits - 1)
    scales = (torch.rand(n_out, n_groups, generator=generator) + 0.1) / (1 << bits)
    groups = torch.arange(n_in) // size
    if is_ordered:
        groups = groups[torch.randperm(n_in, generator=generator)]
    return Grouped(numbers, zeros, scales.to(dtype), groups)


def gptq(*, version: int = 1, **how: Any) -> Writer:
    """Returns a writer of GPTQ; its first version stores zero points less one."""

    def write(n_out: int, n_in: int, generator: torch.Generator) -> Written:
        drawn = draw(n_out, n_in, generator, **how)
        bits = how["bits"]
        zeros = drawn.zeros - 1 if version == 1 else drawn.zeros
        tensors = {
            "qweight": pack_rows(drawn.numbers, bits).t(),
            "qzeros": pack_rows(zeros.t(), bits),
            "scales": drawn.scales.t(),
            "g_idx": drawn.groups.int(),
        }
        return Written(tensors, drawn.weight)

    return write


def awq(**how: Any) -> Writer:
    """Returns a writer of AWQ's "gemm"."""

    def in_order(numbers: Tensor) -> Tensor:
        return numbers.reshape(len(numbers), -1, 8)[:, :, list(AWQ_ORDER)].flatten(1)

    def write(n_out: int, n_in: int, generator: torch.Generator) -> Written:
        drawn = draw(n_out, n_in, generator, bits=4, **how)
        tensors = {
            "qweight": pack_rows(in_order(drawn.numbers.t()), 4),
            "qzeros": pack_rows(in_order(drawn.zeros.t()), 4),
            "scales": drawn.scales.t(),
        }
        return Written(tensors, drawn.weight)

    return write


def packed(**how: Any) -> Writer:
    """Returns a writer of the "pack-quantized" of compressed-tensors."""

    def write(n_out: int, n_in: int, generator: torch.Generator) -> Written:
        drawn = draw(n_out, n_in, generator, dtype=torch.bfloat16, **how)
        bits = how["bits"]
        tensors = {
            "weight_packed": pack_rows(drawn.numbers, bits),
            "weight_scale": drawn.scales,
            "weight_shape": torch.tensor([n_out, n_in]),
        }
        if not how["is_symmetric"]:
            tensors["weight_zero_point"] = pack_rows(drawn.zeros.t(), bits).t()
        if how.get("is_ordered"):
            tensors["weight_g_idx"] = drawn.groups.int()
        return Written(tensors, drawn.weight)

    return write


def scaled(
    dtype: torch.dtype,
    block: tuple[int | None, int | None],
    *,
    name: str = "weight_scale",
    shape: tuple[int, ...] | None = None,
    has_zeros: bool = False,
) -> Writer:
    """Returns a writer of int8 or FP8 with a scale, stored in `shape`, for each block."""

    def write(n_out: int, n_in: int, generator: torch.Generator) -> Written:
        by_row, by_column = block[0] or n_out, block[1] or n_in
        grid = (-(-n_out // by_row), -(-n_in // by_column))
        numbers = torch.randint(-127, 128, (n_out, n_in), generator=generator)
        stored = numbers.to(dtype) if dtype == torch.int8 else (numbers / 8).to(dtype)
        scales = (torch.rand(grid, generator=generator) + 0.1) / 64
        zeros = torch.zeros(grid, dtype=torch.int8)
        if has_zeros:
            zeros = torch.randint(-9, 9, grid, generator=generator, dtype=torch.int8)
        zero_of, scale_of = zeros.tolist(), scales.tolist()
        weight = torch.tensor([
            [
                (number - zero_of[row // by_row][column // by_column])
                * scale_of[row // by_row][column // by_column]
                for column, number in enumerate(numbers)
            ]
            for row, numbers in enumerate(stored.float().tolist())
        ])  # fmt: skip
        tensors = {"weight": stored, name: scales if shape is None else scales.reshape(shape)}
        if has_zeros:
            tensors["weight_zero_point"] = zeros if shape is None else zeros.reshape(shape)
        return Written(tensors, weight)

    return write


def quantise(
    checkpoint: Path,
    quantised: Path,
    writer: Writer,
    config: dict[str, Any],
    *,
    keeps: str = "-",
    others: Mapping[str, Writer] | None = None,
) -> None:
    """Puts drawn matrices into the layers of a checkpoint.

    `checkpoint` then has what they mean, and `quantised` what they are stored as. Modules with
    `keeps` in their names stay as they are, and those whose names end as one of `others` says have
    its writer.
    """
    generator = torch.Generator().manual_seed(0)
    plain = load_file(checkpoint / "model.safetensors")
    stored = dict(plain)
    for name, weight in plain.items():
        if name.endswith(("_proj.weight", "_with_mqa.weight")) and keeps not in name:
            module = name.removesuffix(".weight")
            own = (other for end, other in (others or {}).items() if module.endswith(end))
            written = next(own, writer)(weight.shape[0], weight.shape[1], generator)
            plain[name] = written.weight
            del stored[name]
            stored |= {f"{module}.{end}": tensor for end, tensor in written.tensors.items()}
    quantised.mkdir()
    save_file(plain, checkpoint / "model.safetensors")
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        quantised / "model.safetensors",
    )
    said = json.loads((checkpoint / "config.json").read_text())
    text = json.dumps({**said, "quantization_config": config})
    (quantised / "config.json").write_text(text)
