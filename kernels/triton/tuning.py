"""The tile sizes of attention on a device, by head size, element type and kind of work.

`tiles_for` returns the fastest tiles that `python -m kernels.triton.tune` has measured on a device
with the same name, or a default for the device's compute capability. Measurements are a JSON file
per device in the user's cache (XDG_CACHE_HOME, else `~/.cache`); a process reads the file once. The
file also holds the measurements of `kernels.triton.product_tiles`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton
from triton.runtime import driver

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Kind(StrEnum):
    """The two kinds of items of attention work. Different parts of the device limit their speed."""

    DECODES = "decodes"  # few rows, limited by memory
    SPANS = "spans"  # many rows, limited by the matrix units


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile size of attention, and the numbers of warps and pipeline stages of the program that
    computes a tile."""

    rows: int  # maximum number of queries times heads that share a K/V head
    keys: int  # keys of one step
    n_warps: int
    n_stages: int  # stages of the software pipeline over steps


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a GPU that determine which tiles are chosen."""

    name: str
    capability: int  # 10 * major + minor
    n_multiprocessors: int


# The device for which tiles are chosen if no GPU is present: kernels are then interpreted, or
# compiled for another machine.
_ABSENT = Device("none", capability=90, n_multiprocessors=132)


@cache
def device_of(device: torch.device) -> Device:
    """Returns the properties of the GPU on which kernels for tensors on `device` run. If `device`
    is not a GPU, kernels are interpreted or compiled for another machine, and the properties of an
    assumed GPU are returned."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(
            properties.name,
            capability=10 * properties.major + properties.minor,
            n_multiprocessors=properties.multi_processor_count,
        )
    if triton.knobs.runtime.interpret:
        return _ABSENT
    arch = driver.active.get_current_target().arch
    return Device(_ABSENT.name, capability=arch, n_multiprocessors=_ABSENT.n_multiprocessors)


@cache
def tiles_for(kind: Kind, head_dim: int, dtype: torch.dtype, device: Device) -> Tiles:
    """Returns the measured tile sizes for work of the kind `kind`, or the default sizes if nothing
    was measured."""
    found = measured(device.name).get(entry(kind, head_dim, dtype))
    return Tiles(**found) if found else default_tiles(kind, head_dim, dtype, device)


def default_tiles(kind: Kind, head_dim: int, dtype: torch.dtype, device: Device) -> Tiles:
    """Returns the default tile sizes for the compute capability of `device`. They are used if
    nothing was measured."""
    n_dims = triton.next_power_of_2(head_dim)
    if n_dims > 256:
        return _wide_tiles(kind, dtype, device)
    if dtype == torch.float32:
        # Products do not use the matrix units, and their operands take registers.
        if kind is Kind.DECODES:
            return Tiles(rows=16, keys=16 if n_dims > 128 else 32, n_warps=8, n_stages=2)
        return Tiles(rows=32, keys=16, n_warps=8, n_stages=2)
    if kind is Kind.DECODES:
        return Tiles(rows=16, keys=32 if n_dims > 128 else 64, n_warps=4, n_stages=3)
    if device.capability < 90:
        # 99 KiB is the smallest limit of shared memory per program among these devices.
        rows, keys = (64, 32) if n_dims > 128 else (128, 64 if n_dims <= 64 else 32)
        return Tiles(rows, keys, n_warps=8, n_stages=2 if n_dims > 128 else 3)
    return Tiles(rows=128, keys=32 if n_dims > 128 else 64, n_warps=8, n_stages=3)


def _wide_tiles(kind: Kind, dtype: torch.dtype, device: Device) -> Tiles:
    """Returns the tile sizes for heads of more than 256 elements, for example latents. The sums of
    such heads take most of the registers."""
    if dtype == torch.float32:
        return Tiles(rows=16, keys=16, n_warps=8, n_stages=1)  # two stages take over 99 KiB
    if device.capability < 90:
        return Tiles(16 if kind is Kind.DECODES else 32, keys=16, n_warps=8, n_stages=2)
    return Tiles(16 if kind is Kind.DECODES else 64, keys=32, n_warps=8, n_stages=2)


def entry(kind: Kind, head_dim: int, dtype: torch.dtype) -> str:
    """Returns the key under which the fastest tiles for attention are stored in the file of
    measurements."""
    return f"{kind} {head_dim} {str(dtype).removeprefix('torch.')}"


def measurements_path(device_name: str) -> Path:
    """Returns the path of the file with the measurements for devices of the given name."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = re.sub(r"[^\w.-]+", "_", device_name)
    return Path(cache_home, "orcinus", "tuning", f"{name}.json")


@cache
def measured(device_name: str) -> Mapping[str, Mapping[str, int]]:
    """Returns the measured tiles for devices of the given name. Each entry has the fields of
    `Tiles` or `ProductTiles`."""
    return _read(device_name)


def _read(device_name: str) -> Mapping[str, Mapping[str, int]]:
    path = measurements_path(device_name)
    found: Mapping[str, Mapping[str, int]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(device_name: str, tiles: Mapping[str, DataclassInstance]) -> Path:
    """Adds `tiles`, by their keys, to the file of measurements for devices of the given name.

    Returns the path of the file. Processes that have read the file do not see the change.
    """
    path = measurements_path(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    together = {**_read(device_name), **{name: asdict(each) for name, each in tiles.items()}}
    path.write_text(json.dumps(dict(sorted(together.items())), indent=1) + "\n")
    return path
