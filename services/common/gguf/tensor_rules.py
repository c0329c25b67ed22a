"""How a family's tensors are stored in GGUF files, as plain data.

A checkpoint of a family and a GGUF file of the same model hold the same weights under different
names, and sometimes in another arrangement. Each class here is one arrangement; a plain text is the
name of a tensor that is stored as the family expects it. The rules are only declared here: the
workers carry them out.

The name of a stored tensor stands without the prefix of its layer (`blk.7.`). A name without a dot
gets the ending of the family's tensor, `.weight` or `.bias`; a name with a dot is complete, and a
dot at its end is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of heads whose rotated elements lie side by side, where the family has them half a head
    apart."""

    name: str
    heads: Literal["q", "kv"]


@dataclass(frozen=True, slots=True)
class PlusOne:
    """Scales of a norm with 1 added, which the family adds itself."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a stack [n, ...]; the number is in the family's name."""

    name: str


@dataclass(frozen=True, slots=True)
class Numbered:
    """A tensor of its own for each number; `{}` in the name stands for the number."""

    name: str


@dataclass(frozen=True, slots=True)
class OneRow:
    """A vector that is a matrix of one row in the family."""

    name: str


@dataclass(frozen=True, slots=True)
class Fused:
    """The queries, keys or values of one matrix that holds the three one after the other."""

    name: str
    part: Literal["q", "k", "v"]


@dataclass(frozen=True, slots=True)
class Both:
    """Two stacks [n, size, ...] that are one stack [n, 2 * size, ...] in the family.

    The rows of the two alternate, or the rows of the first come before those of the second.
    """

    first: str
    second: str
    alternates: bool


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Matrices from latents to keys and to values, which are one matrix in the family.

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
    """Projections to queries, keys and values, and to z, that the family stores as one matrix with
    the rows of each key head together."""

    qkv: str
    z: str


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """Rows or columns of value heads in another order.

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
    """The decays of value heads, which the family stores as the logarithm of their negation."""

    name: str
    is_tiled: bool  # in the order that `ValueHeads` describes


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel of a convolution [channels, width], in the family [channels, 1, width]."""

    name: str
    is_tiled: bool  # in the order that `ValueHeads` describes


@dataclass(frozen=True, slots=True)
class First:
    """The first of several rules whose tensors the file has: files of different ages differ."""

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
"""Rules by the family's names. Names inside layers stand without the prefix of the layer, numbers
of experts are `{}`, and the endings `.weight` and `.bias` are left out."""


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
