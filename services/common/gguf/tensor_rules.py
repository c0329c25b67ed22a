"""How the tensors of a model family are stored in GGUF files, as plain data.

The model family's own checkpoint and a GGUF file of the same model hold the same weights under
different names, and sometimes in another arrangement. Each class here describes one arrangement. A
tensor that differs only in its name is described by the name in the GGUF file, a plain text. This
module only declares the rules, and the workers apply them.

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
    the model family's tensor, the two elements are half a head apart."""

    name: str
    heads: Literal["q", "kv"]


@dataclass(frozen=True, slots=True)
class PlusOne:
    """The scales of a norm, which are greater by 1 in the file than in the model family's tensor.
    The code of the family adds this 1 itself."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a stacked tensor [n, ...] in the file. The model family has a separate tensor for
    each item, with the number of the item in its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Numbered:
    """One of several numbered tensors in the file. `{}` in the name stands for the number."""

    name: str


@dataclass(frozen=True, slots=True)
class OneRow:
    """A vector in the file that is a matrix with one row in the model family."""

    name: str


@dataclass(frozen=True, slots=True)
class Fused:
    """The projection to queries, to keys or to values, which is a part of one matrix in the file.
    The matrix has the rows for queries, then for keys, then for values."""

    name: str
    part: Literal["q", "k", "v"]


@dataclass(frozen=True, slots=True)
class Both:
    """Two stacks [n, size, ...] in the file that are one stack [n, 2 * size, ...] in the model
    family.

    In the joined stack, the rows of the two stacks alternate if `alternates`. Otherwise all rows of
    the first stack precede the rows of the second.
    """

    first: str
    second: str
    alternates: bool


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Two stacks of matrices in the file, from latents to keys and from latents to values, which
    are one matrix in the model family.

    `keys` is [n_heads, latent, size] and `values` is [n_heads, size, latent].
    """

    keys: str
    values: str


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix [n_out, n_in] in the file that is stored as [n_in, n_out] in the model family."""

    name: str


@dataclass(frozen=True, slots=True)
class KeyGroups:
    """Two projections in the file: `qkv` to queries, keys and values, and `z` to the gates of the
    output. The model family has one matrix instead, in which all rows that belong to one key head
    are adjacent."""

    qkv: str
    z: str


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """Rows or columns of value heads, which the file stores in another order.

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
    """The decays of value heads. The model family stores the logarithm of the negated decay."""

    name: str
    is_tiled: bool  # in the order that `ValueHeads` describes


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel of a convolution: [channels, width] in the file, and [channels, 1, width] in the
    model family."""

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
