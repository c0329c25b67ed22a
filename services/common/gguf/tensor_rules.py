"""Describes how the tensors of a model family are stored in GGUF files, as plain data.

The model family's own checkpoint and a GGUF file of the same model hold the same weights under
different names, and sometimes in another arrangement. Each class here is a rule that makes a tensor
of the model family from one or two tensors in the file. For a tensor that differs only in its name,
the rule is the name in the GGUF file, a plain text. This module only declares the rules. The
workers apply them.

Names of stored tensors are written without the prefix of the layer (`blk.7.`). A name without a dot
gets the ending of the family's tensor, `.weight` or `.bias`; a name with a dot is complete, and a
dot at its end is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Pairs:
    """Moves rows within each head. In the file, the two elements of a rotated pair are adjacent. In
    the model family's tensor, they are half a head apart."""

    name: str
    heads: Literal["q", "kv"]


@dataclass(frozen=True, slots=True)
class PlusOne:
    """Subtracts 1 from the scales of a norm. The file has each scale plus 1, but the code of the
    model family adds this 1 itself."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """Takes one item of a stacked tensor [n, ...] in the file. The model family has a separate
    tensor for each item, whose name has the number of the item."""

    name: str


@dataclass(frozen=True, slots=True)
class Numbered:
    """Takes one of several numbered tensors in the file. `{}` in `name` stands for the number."""

    name: str


@dataclass(frozen=True, slots=True)
class OneRow:
    """Makes a matrix with one row from a vector in the file."""

    name: str


@dataclass(frozen=True, slots=True)
class Fused:
    """Takes the projection to queries, to keys or to values out of one matrix in the file. This
    matrix has the rows for queries, then for keys, then for values."""

    name: str
    part: Literal["q", "k", "v"]


@dataclass(frozen=True, slots=True)
class Both:
    """Joins two stacks [n, size, ...] in the file into one stack [n, 2 * size, ...].

    In the joined stack, the rows of the two stacks alternate if `alternates`. Otherwise all rows of
    the first stack precede the rows of the second.
    """

    first: str
    second: str
    alternates: bool


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Joins two stacks of matrices in the file, from latents to keys and from latents to values,
    into one matrix.

    `keys` is [n_heads, latent, size] and `values` is [n_heads, size, latent].
    """

    keys: str
    values: str


@dataclass(frozen=True, slots=True)
class Transposed:
    """Transposes a matrix. It is [n_out, n_in] in the file, and [n_in, n_out] in the model
    family."""

    name: str


@dataclass(frozen=True, slots=True)
class KeyGroups:
    """Joins two projections in the file into one matrix, in which all rows that belong to one key
    head are adjacent. The projection `qkv` makes queries, keys and values, and `z` makes the gates
    of the output."""

    qkv: str
    z: str


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """Reorders the rows or the columns that belong to value heads.

    The file has the first value head of every key head, then the second value head of every key
    head, and so on. The model family has all value heads of the first key head, then all value
    heads of the second key head, and so on. `size` is the number of elements of a head: one, or the
    size of its values. `skips_keys` says that the rows of queries and keys come first and stay in
    place.
    """

    name: str
    size: Literal["one", "values"]
    skips_keys: bool = False
    is_columns: bool = False


@dataclass(frozen=True, slots=True)
class Decay:
    """Converts the decays of value heads. The file has a decay, which is negative. The model family
    has the logarithm of the negated decay."""

    name: str
    is_tiled: bool  # in the order that `ValueHeads` describes


@dataclass(frozen=True, slots=True)
class Kernel:
    """Reshapes the kernel of a convolution: [channels, width] in the file, and [channels, 1, width]
    in the model family."""

    name: str
    is_tiled: bool  # in the order that `ValueHeads` describes


@dataclass(frozen=True, slots=True)
class First:
    """Chooses among alternative rules, for files of different versions: applies the first rule
    whose tensors are all in the file."""

    rules: tuple[Rule, ...]


Rule: TypeAlias = (
    str
    | Pairs
    | PlusOne
    | Item
    | Numbered
    | OneRow
    | Fused
    | Both
    | LatentHeads
    | Transposed
    | KeyGroups
    | ValueHeads
    | Decay
    | Kernel
    | First
)
Rules: TypeAlias = Mapping[str, Rule]
"""Type of a mapping from the family's names of tensors to rules. Names inside layers are written
without the prefix of the layer, `{}` stands for the number of an expert, and the endings `.weight`
and `.bias` are left out."""


def stored_names(rule: Rule) -> tuple[str, ...]:
    """Returns the names of the tensors, in the GGUF file, that a rule may read."""
    match rule:
        case str():
            return (rule,)
        case Both(first, second) | LatentHeads(first, second) | KeyGroups(first, second):
            return (first, second)
        case First(rules):
            return tuple(name for each in rules for name in stored_names(each))
        case _:
            return (rule.name,)
