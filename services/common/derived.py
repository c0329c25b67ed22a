"""A value that is derived from a checkpoint's files, together with its origin."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value", covariant=True)


@dataclass(frozen=True, slots=True)
class Derived(Generic[Value]):
    """A value and its origin, as text: the files and keys, and the rule if the value was computed.

    For example `Derived(8192, "max_position_embeddings 4096 times rope_scaling.factor 2")`.
    """

    value: Value
    source: str
