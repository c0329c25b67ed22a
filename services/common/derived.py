"""A value that is derived from a checkpoint's files, together with its source."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value", covariant=True)


@dataclass(frozen=True, slots=True)
class Derived(Generic[Value]):
    """A value and where it comes from: files, keys and, where they need one, the rule.

    For example `Derived(8192, "max_position_embeddings 4096 times rope_scaling.factor 2")`.
    """

    value: Value
    source: str
