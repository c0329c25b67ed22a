"""How a family's tensors are stored in GGUF files, as plain data.

A checkpoint of a family and a GGUF file of the same model hold the same weights under different
names, and sometimes in another arrangement. Each class here describes one arrangement. A tensor
without any difference is described by its name alone, a plain text. This module only declares the
rules, and the workers apply them.

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
    """Rows of heads in which the file stores the two elements of a rotated pair side by side. In
    the family, the two are half a head apart."""

    name: str
    heads: Literal["q", "kv"]


@dataclass(frozen=True, slots=True)
class PlusOne:
    """The scales of a norm, which are greater by 1 in the file than in the family. The family's
    code adds this 1 itself."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a stacked tensor [n, ...]. The number of the item stands in the family's name of
    the tensor."""

    name: str


@dataclass(frozen=True, slots=True)
class Numbered:
    """One of several numbered tensors; `{}` in the name stands for the number."""

    name: str


@dataclass(frozen=True, slots=True)
class OneRow:
    """A vector in the file that the family has as a matrix with one row."""

    name: str


@dataclass(frozen=True, slots=True)
class Fused:
    """The queries, the keys or the values, taken from one matrix that holds all three one after the
    other."""

    name: str
    part: Literal["q", "k", "v"]


@dataclass(frozen=True, slots=True)
class Both:
    """Two stacks [n, size, ...] in the file that are one stack [n, 2 * size, ...] in the family.

    In the joined stack, the rows of the two alternate, or the rows of the first come before the
    rows of the second.
    """

    first: str
    second: str
    alternates: bool


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Two stacks of matrices in the file, from latents to keys and from latents to values, which
    are one matrix in the family.

    `keys` is [n_heads, latent, size] and `values` is [n_heads, size, latent].
    """

    keys: str
    values: str


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix [n_out, n_in] that the family stores as [n_in, n_out]."""

    name: str


@dataclass(frozen=True, slots=True)
class KeyGroups:
    """Two stored projections: `qkv` to queries, keys and values, and `z` to the gates of the
    output. The family has one matrix instead, in which all rows that belong to one key head stand
    together."""

    qkv: str
    z: str


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """Rows or columns of value heads, which the file stores in another order.

    The file has the first value head of every key head, then the second of every key head, and so
    on. The family has all value heads of the first key head first. `size` is the number of elements
    of a head: one, or the size of its values. `skips_keys` says that the rows of queries and keys
    come first and stay in place.
    """

    name: str
    size: Literal["one", "values"]
    skips_keys: bool = False
    is_columns: bool = False


@dataclass(frozen=True, slots=True)
class Decay:
    """The decays of value heads. The family stores the logarithm of the negated decay."""

    name: str
    is_tiled: bool  # in the order that `ValueHeads` describes


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel of a convolution: [channels, width] in the file, and [channels, 1, width] in the
    family."""

    name: str
    is_tiled: bool  # in the order that `ValueHeads` describes


@dataclass(frozen=True, slots=True)
class First:
    """Alternative rules, for files of different versions. The first rule whose tensors are all in
    the file is used."""

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
    """Returns the names of the stored tensors that a rule may read."""
    match rule:
        case str():
            return (rule,)
        case Both(first, second) | LatentHeads(first, second) | KeyGroups(first, second):
            return (first, second)
        case First(rules):
            return tuple(name for each in rules for name in stored_names(each))
        case _:
            return (rule.name,)
