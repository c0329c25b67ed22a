"""Describes how the tensors of a model family are made from the tensors in a GGUF file.

`RowView` reorders rows of stored tensors, so quantised blocks stay as they are. `ComputedView`
reads whole tensors and computes the family's tensor from them. `make_view` carries out the rules of
`services.common.gguf.tensor_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from services.common.gguf.tensor_rules import (
    Both,
    Decay,
    First,
    Fused,
    Item,
    Kernel,
    KeyGroups,
    LatentHeads,
    Numbered,
    OneRow,
    Pairs,
    PlusOne,
    Rule,
    Transposed,
    ValueHeads,
)
from services.worker.models.config import ModelConfig
from services.worker.models.hybrid import DeltaNetShape
from services.worker.models.tensor_files import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the file, with its full name and its shape."""

    name: str
    shape: Shape

    @property
    def n_rows(self) -> int:
        """The number of rows. A stack has the rows of all its matrices, and each element of a
        vector is a row."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RowView:
    """A tensor that is made of rows of stored tensors, in a given order.

    The rows of all `sources` are numbered one after the other. A stack [n, size, n_columns] counts
    as n * size rows, and each element of a vector is a row.
    """

    sources: tuple[Stored, ...]
    shape: Shape
    rows: Tensor | range  # the stored row of each row of this tensor
    change: Callable[[Tensor], Tensor] | None = None  # of each value; None: as stored
    columns: Tensor | None = None  # the stored column of each column; None: as stored


@dataclass(frozen=True, slots=True)
class ComputedView:
    """A tensor that is computed from stored tensors, each of which is read as a whole."""

    sources: tuple[Stored, ...]
    shape: Shape
    compute: Callable[..., Tensor]  # takes the sources, returns a tensor of `shape`


View = RowView | ComputedView
Find = Callable[[str], Stored | None]
"""A function that returns the stored tensor with a name that a rule uses, or None if the file lacks
it."""


@runtime_checkable
class _HasDeltaNet(Protocol):
    """A configuration of a family in which some layers keep a recurrent state."""

    @property
    def delta_net(self) -> DeltaNetShape: ...


def make_view(rule: Rule, find: Find, config: ModelConfig, number: int) -> View | None:
    """Returns how a family's tensor is made from stored tensors, as `rule` says.

    `number` is the number that the family's name of the tensor has after the index of the layer,
    such as the index of an expert. It is 0 if there is none. The result is None if the file lacks a
    tensor of the rule. Raises CheckpointError if a stored tensor has a shape that does not fit the
    rule.
    """
    match rule:
        case First(rules):
            views = (make_view(each, find, config, number) for each in rules)
            return next((view for view in views if view is not None), None)
        case Both(first, second) | LatentHeads(first, second) | KeyGroups(first, second):
            stored, other = find(first), find(second)
            if stored is None or other is None:
                return None
            return _checked(_of_two(rule, stored, other, config), rule, stored, other)
        case str(name):
            stored = find(name)
        case Numbered(name):
            stored = find(name.format(number))
        case _:
            stored = find(rule.name)
    return None if stored is None else _checked(_of_one(rule, stored, config, number), rule, stored)


def _checked(view: View | None, rule: Rule, *sources: Stored) -> View:
    """Returns `view`. Raises CheckpointError if `view` is None, because the shapes of `sources` do
    not fit the rule."""
    if view is None:
        said = " and ".join(f"{each.name} {list(each.shape)}" for each in sources)
        raise CheckpointError(f"{said}: not the shapes of {type(rule).__name__}")
    return view


def _of_one(rule: Rule, stored: Stored, config: ModelConfig, number: int) -> View | None:
    """Returns the view that a rule makes from one stored tensor, or None if the tensor's shape does
    not fit."""
    if not stored.shape:
        return None
    match rule:
        case Pairs(_, heads):
            n_heads = config.n_heads if heads == "q" else config.n_kv_heads
            return RowView((stored,), stored.shape, _halves(stored.n_rows, n_heads))
        case PlusOne():
            return _whole(stored, change=lambda scales: scales - 1)
        case Item():
            return _item(stored, number)
        case OneRow():
            return _whole(stored, (1, math.prod(stored.shape)))
        case Fused(_, part):
            rows = _fused_rows(config, part)
            if rows.stop > stored.n_rows:
                return None
            return RowView((stored,), (len(rows), *stored.shape[1:]), rows)
        case Transposed() if len(stored.shape) == 2:
            return ComputedView((stored,), stored.shape[::-1], lambda matrix: matrix.t())
        case ValueHeads() | Decay() | Kernel():
            return _of_value_heads(rule, stored, _delta_net(config))
        case _:
            return _whole(stored)


def _of_two(
    rule: Both | LatentHeads | KeyGroups, first: Stored, second: Stored, config: ModelConfig
) -> View | None:
    """Returns the view that a rule makes from two stored tensors, or None if their shapes do not
    fit."""
    match rule:
        case Both(_, _, alternates):
            fits = first.shape == second.shape and len(first.shape) > 1
            return _both(first, second, alternates) if fits else None
        case LatentHeads():
            return _latent_heads(first, second)
        case KeyGroups():
            rows = _grouped_rows(_delta_net(config), first.n_rows)
            fits = first.shape[1:] == second.shape[1:] and len(first.shape) == 2
            if not fits or len(rows) != first.n_rows + second.n_rows:
                return None
            return RowView((first, second), (len(rows), first.shape[-1]), rows)


def _whole(
    stored: Stored,
    shape: Shape | None = None,
    *,
    change: Callable[[Tensor], Tensor] | None = None,
) -> RowView:
    return RowView((stored,), shape or stored.shape, range(stored.n_rows), change)


def _halves(n_rows: int, n_heads: int) -> Tensor | range:
    """Returns the stored index of each row of a matrix of heads. In the file, the two rows of a
    rotated pair are neighbours; in the result, they are half a head apart."""
    if n_rows % (2 * n_heads):
        return range(n_rows)  # the wrong shape is reported later
    return torch.arange(n_rows).view(n_heads, -1, 2).transpose(1, 2).flatten()


def _latent_heads(keys: Stored, values: Stored) -> ComputedView | None:
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[0] != values.shape[0]:
        return None
    n_heads, latent_dim, size = keys.shape
    if values.shape[2] != latent_dim:
        return None
    n_rows = n_heads * (size + values.shape[1])
    return ComputedView((keys, values), (n_rows, latent_dim), _joined_heads)


def _item(stored: Stored, number: int) -> RowView | None:
    if len(stored.shape) < 2 or number >= stored.shape[0]:
        return None
    size = stored.n_rows // stored.shape[0]
    return RowView((stored,), stored.shape[1:], range(number * size, (number + 1) * size))


def _fused_rows(config: ModelConfig, part: str) -> range:
    n_q, n_kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    begin, size = {"q": (0, n_q), "k": (n_q, n_kv), "v": (n_q + n_kv, n_kv)}[part]
    return range(begin, begin + size)


def _both(first: Stored, second: Stored, alternates: bool) -> View:
    n, size, *columns = first.shape
    shape = (n, 2 * size, *columns)

    def joined(one: Tensor, other: Tensor) -> Tensor:
        if alternates:
            return torch.stack((one, other), 2).flatten(1, 2)
        return torch.cat((one, other), 1)

    if not columns:
        return ComputedView((first, second), shape, joined)
    rows = joined(*torch.arange(2 * n * size).view(2, n, size))
    # Half the memory of longer integers: a layer may have a million rows.
    return RowView((first, second), shape, rows.flatten().int())


def _joined_heads(keys: Tensor, values: Tensor) -> Tensor:
    """Returns, for each head in turn, the rows that produce its keys, followed by the rows that
    produce its values."""
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


def _delta_net(config: ModelConfig) -> DeltaNetShape:
    if not isinstance(config, _HasDeltaNet):
        raise TypeError(f"{config.architecture} has no layers that keep a state")
    return config.delta_net


def _grouped_rows(shape: DeltaNetShape, n_qkv: int) -> Tensor:
    """Returns the stored index of each row of the fused projection. The result has, for one key
    head after the other, the rows of queries, keys, values and z."""
    n_heads = shape.n_key_heads
    n_keys, n_values = n_heads * shape.key_dim, shape.n_value_heads * shape.value_dim
    kinds = ((0, n_keys), (n_keys, n_keys), (2 * n_keys, n_values), (n_qkv, n_values))
    rows = [torch.arange(begin, begin + size).view(n_heads, -1) for begin, size in kinds]
    return torch.cat(rows, 1).flatten()


def _of_value_heads(
    rule: ValueHeads | Decay | Kernel, stored: Stored, net: DeltaNetShape
) -> RowView:
    match rule:
        case ValueHeads(_, size, skips_keys, is_columns):
            n = net.value_dim if size == "values" else 1
            if is_columns:
                columns = _untiled(net, n, skips_keys=False)
                if columns is not None and len(columns) != stored.shape[-1]:
                    columns = None  # the wrong shape is reported later
                return RowView((stored,), stored.shape, range(stored.n_rows), None, columns)
            rows = _untiled(net, n, skips_keys=skips_keys)
            return RowView((stored,), stored.shape, _fitting(rows, stored))
        case Decay(_, is_tiled):
            rows = _untiled(net, 1, skips_keys=False) if is_tiled else None
            return RowView((stored,), stored.shape, _fitting(rows, stored), _log_of_negation)
        case Kernel(_, is_tiled):
            rows = _untiled(net, net.value_dim, skips_keys=True) if is_tiled else None
            width = stored.shape[-1]
            return RowView((stored,), (stored.n_rows, 1, width), _fitting(rows, stored))


def _fitting(rows: Tensor | None, stored: Stored) -> Tensor | range:
    """Returns `rows` if their number is the tensor's number of rows, otherwise all rows in stored
    order. The wrong shape of the tensor is reported later."""
    return rows if rows is not None and len(rows) == stored.n_rows else range(stored.n_rows)


def _untiled(net: DeltaNetShape, size: int, *, skips_keys: bool) -> Tensor | None:
    """Returns the stored index of each element of the value heads, which have `size` elements each.
    With `skips_keys`, the elements of queries and keys come first and stay in place. Returns None
    if the stored order is already right."""
    if net.group_size == 1:
        return None
    first = 2 * net.n_key_heads * net.key_dim if skips_keys else 0
    tiled = torch.arange(net.n_value_heads * size).view(net.group_size, net.n_key_heads, size)
    return torch.cat((torch.arange(first), first + tiled.transpose(0, 1).flatten()))


def _log_of_negation(values: Tensor) -> Tensor:
    return torch.log(-values)
