"""The tensors of a GGUF file, read dequantised or as the stored blocks.

Rows are dequantised by the package `gguf`. `quantised/gguf_matrix.py` reads some of the blocks as
quantised matrices instead. Converters to GGUF rename and rearrange tensors.
`services.common.gguf.architectures` declares these changes, and `gguf_views.py` reverts them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from services.common.gguf.header import GgufHeader, TensorPlace
from services.common.gguf.model_config import architecture_of
from services.common.gguf.tensor_rules import stored_names
from services.worker.models.config import ModelConfig
from services.worker.models.gguf_views import ComputedView, RowView, Stored, View, make_view
from services.worker.models.tensor_files import (
    CheckpointError,
    Header,
    TensorFiles,
    enumerate_problems,
)

_Read = Callable[[TensorPlace, range], Tensor]

# The element types that can be read, by number.
_TYPES = {
    int(GGMLQuantizationType[name]): GGMLQuantizationType[name]
    for name in (
        "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K",
        "Q5_K", "Q6_K", "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS",
        "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
    )
}  # fmt: skip

# The layer and the rest of a family's name, and a number inside of the rest.
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ENDING = re.compile(r"\.(?:weight|bias)$")
# Tensors that say how positions are rotated.
_NOT_WEIGHTS = frozenset(("rope_freqs", "rope_factors_long", "rope_factors_short"))
_MAX_GAP = 64  # rows between wanted rows that are read with them


class GgufFile(TensorFiles):
    """An open GGUF model, of one file or several files. Only the requested rows are read into
    memory."""

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        """Prepares reading the tensors. Raises CheckpointError for tensors that the architecture
        does not have, because the computation would leave them out."""
        self._fds: dict[Path, int] = {}
        self._header = header
        self._config = config
        self._rules = architecture_of(header).tensors
        self._views: dict[str, View] = {}  # by the names that `find` returns
        self._refuse_unknown()

    def __str__(self) -> str:
        return str(self._header.path)

    def __del__(self) -> None:
        self.close()

    @property
    def is_gguf(self) -> bool:
        return True

    def find(self, name: str) -> str | None:
        view = self._view_of(name)
        if view is None:
            return None
        key = " and ".join(stored.name for stored in view.sources)
        n_stored = sum(stored.n_rows for stored in view.sources)
        if isinstance(view, RowView) and len(view.rows) != n_stored:
            key = f"{key} ({name})"
        self._views[key] = view
        return key

    def names(self) -> Collection[str]:
        return ()

    def paths(self) -> Collection[Path]:
        return {place.path for place in self._header.tensors.values()}

    def header(self, name: str) -> Header:
        """Returns the shape of the tensor and its element type: float32 if `read` can dequantise
        the tensor, otherwise the name of the stored type.

        Raises CheckpointError if a file ends inside the tensor.
        """
        view = self._views[name]
        row_bytes = 4 * math.prod(view.shape[1:])
        for place in self._places(view):
            if not place.shape or place.type not in _TYPES or not _has_whole_blocks(place):
                return Header(view.shape, _name_of(place.type), row_bytes)
        for stored, place in zip(view.sources, self._places(view), strict=True):
            if place.offset + stored.n_rows * _row_bytes(place) > place.path.stat().st_size:
                raise CheckpointError(f"{place.path} ends inside {stored.name}")
        return Header(view.shape, "F32", row_bytes)

    def read(self, name: str, spans: Sequence[range]) -> Tensor:
        view = self._views[name]
        index = tuple(slice(span.start, span.stop) for span in spans)
        if isinstance(view, ComputedView):
            whole = [
                self._rows(place, range(stored.n_rows)).view(stored.shape)
                for stored, place in zip(view.sources, self._places(view), strict=True)
            ]
            return view.compute(*whole)[index]
        n_rows = len(view.rows) // max(1, view.shape[0])  # of one index of the first dimension
        found = self._rows_of(
            view, range(spans[0].start * n_rows, spans[0].stop * n_rows), self._rows
        )
        found = found if view.columns is None else found[:, view.columns]
        found = found if view.change is None else view.change(found)
        return found.view(len(spans[0]), *view.shape[1:])[:, *index[1:]]

    def is_in_blocks(self, name: str) -> bool:
        """Returns whether a tensor can be read as stored blocks: its rows must consist of whole
        quantised blocks of one type, in the order of the file's columns. The tensor is a matrix or
        a stack of matrices."""
        view = self._views[name]
        if not isinstance(view, RowView) or view.columns is not None or view.change is not None:
            return False
        first, *others = self._places(view)
        if len(view.shape) < 2 or len(first.shape) < 2 or first.type not in _TYPES:
            return False
        if any(place.type != first.type for place in others) or not _has_whole_blocks(first):
            return False
        return GGML_QUANT_SIZES[_TYPES[first.type]][0] > 1

    def block_type(self, name: str) -> str:
        """Returns the name of a tensor's GGUF type."""
        return _name_of(self._places(self._views[name])[0].type)

    def read_blocks(self, name: str, rows: range) -> Tensor:
        """Returns the stored blocks of some rows, [n_rows, bytes of a row]. The rows of a stack are
        counted across its matrices. `is_in_blocks` must be true for the tensor."""
        view = self._views[name]
        if not isinstance(view, RowView):
            raise TypeError(f"{name} is computed, and has no blocks")
        return self._rows_of(view, rows, self._stored_rows)

    def unread_biases(self) -> list[str]:
        found = {stored.name for view in self._views.values() for stored in view.sources}
        layers = {name.rsplit(".", 2)[0] for name in found if name.startswith("blk.")}
        return [
            name
            for name in self._header.tensors
            if name.endswith(".bias") and name not in found and name.rsplit(".", 2)[0] in layers
        ]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def _view_of(self, name: str) -> View | None:
        """Returns how the family's tensor `name` is made from stored tensors, or None if the file
        lacks it."""
        ending = _ENDING.search(name)
        stem = name if ending is None else name[: ending.start()]
        prefix = ""
        if in_layer := _LAYER.fullmatch(stem):
            prefix, stem = f"blk.{in_layer[1]}.", in_layer[2]
        number = _NUMBER.search(stem)
        rule = self._rules.get(_NUMBER.sub("{}", stem))
        if rule is None:
            return None

        def find(stored: str) -> Stored | None:
            own = ".weight" if ending is None else ending[0]
            full = prefix + (stored.rstrip(".") if "." in stored else stored + own)
            place = self._header.tensors.get(full)
            return None if place is None else Stored(full, place.shape)

        try:
            return make_view(rule, find, self._config, 0 if number is None else int(number[0]))
        except CheckpointError as error:
            raise CheckpointError(f"{self}: {error}") from error

    def _refuse_unknown(self) -> None:
        known = {
            _ENDING.sub("", name.rstrip("."))
            for rule in self._rules.values()
            for name in stored_names(rule)
        }
        unknown = []
        for name in self._header.tensors:
            stem = _ENDING.sub("", name)
            if stem.startswith("blk."):
                _, layer, stem = [*stem.split(".", 2), "", ""][:3]
                if layer.isdecimal() and int(layer) >= self._config.n_layers:
                    continue  # of layers that predict further tokens, which are not run
            if not {stem, _NUMBER.sub("{}", stem)} & (known | _NOT_WEIGHTS):
                unknown.append(name)
        if unknown:
            raise CheckpointError(
                f"{self} has tensors that are not read here: {enumerate_problems(unknown)}"
            )

    def _places(self, view: View) -> list[TensorPlace]:
        return [self._header.tensors[stored.name] for stored in view.sources]

    def _rows_of(self, view: RowView, rows: range, read: _Read) -> Tensor:
        """Returns the rows `rows` of a view, [n_rows, n]. `read` is the function that reads rows of
        a stored tensor: dequantised, or as bytes."""
        wanted = view.rows[rows.start : rows.stop]
        places = self._places(view)
        if isinstance(wanted, range):
            return read(places[0], wanted)
        parts, where, begin = [], [], 0
        for stored, place in zip(view.sources, places, strict=True):
            is_here = (wanted >= begin) & (wanted < begin + stored.n_rows)
            parts.append(_scattered(place, wanted[is_here] - begin, read))
            where.append(is_here.nonzero().flatten())
            begin += stored.n_rows
        return torch.cat(parts)[torch.cat(where).argsort()]

    def _rows(self, place: TensorPlace, rows: range) -> Tensor:
        """Returns dequantised rows of a stored tensor, in the order of the file, [n_rows,
        n_columns]."""
        n_columns = _n_columns(place)
        if not rows:
            return torch.empty(0, n_columns)
        blocks = self._stored_rows(place, rows).numpy()
        values: np.ndarray[Any, Any] = dequantize(blocks, _TYPES[place.type])
        return torch.from_numpy(values.reshape(len(rows), n_columns))

    def _stored_rows(self, place: TensorPlace, rows: range) -> Tensor:
        """Returns the stored bytes of a tensor's rows, in the order of the file, [n_rows, bytes of
        a row]."""
        row_bytes = _row_bytes(place)
        if not rows:
            return torch.empty(0, row_bytes, dtype=torch.uint8)
        content = bytearray(len(rows) * row_bytes)
        if place.path not in self._fds:
            self._fds[place.path] = os.open(place.path, os.O_RDONLY)
        n_read = os.preadv(self._fds[place.path], [content], place.offset + rows.start * row_bytes)
        if n_read < len(content):
            raise CheckpointError(f"{place.path} ends inside a tensor")
        return torch.frombuffer(content, dtype=torch.uint8).view(len(rows), row_bytes)


def _scattered(place: TensorPlace, rows: Tensor, read: _Read) -> Tensor:
    """Returns the given rows of a stored tensor. `rows` may be in any order. Rows that are near
    each other are read together."""
    if not len(rows):
        return read(place, range(0))
    ordered, order = rows.sort()
    cuts = [0, *((ordered.diff() > _MAX_GAP).nonzero().flatten() + 1).tolist(), len(rows)]
    found = []
    for begin, end in pairwise(cuts):
        first, last = int(ordered[begin]), int(ordered[end - 1])
        found.append(read(place, range(first, last + 1))[ordered[begin:end] - first])
    return torch.cat(found)[order.argsort()]


def _n_columns(place: TensorPlace) -> int:
    """Returns the number of elements in a row of a stored tensor. Each element of a vector is a
    row."""
    return place.shape[-1] if len(place.shape) > 1 else 1


def _has_whole_blocks(place: TensorPlace) -> bool:
    """Returns whether each row of a stored tensor consists of whole blocks. A block is a number of
    elements that share scales."""
    return _n_columns(place) % GGML_QUANT_SIZES[_TYPES[place.type]][0] == 0


def _row_bytes(place: TensorPlace) -> int:
    n_per_block, n_bytes = GGML_QUANT_SIZES[_TYPES[place.type]]
    return _n_columns(place) // n_per_block * n_bytes


def _name_of(kind: int) -> str:
    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"
