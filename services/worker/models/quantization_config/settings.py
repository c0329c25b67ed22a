"""The base classes of the settings of every quantisation method."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from services.worker.models.config import JsonObject
from services.worker.models.weight_format import WeightFormat

KV_NOTE = "the quantisation of stored keys and values is not applied: they keep the element type"


# Lists of JSON become tuples; otherwise a value must have exactly the type of its field.
Names = Annotated[tuple[str, ...], Field(strict=False)]
Sizes = Annotated[tuple[int, int], Field(strict=False)]


class Settings(BaseModel):
    """A group of settings. The fields are the known keys, and `ignored` names further keys that
    change no result."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    ignored: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def read(cls, given: JsonObject) -> Self:
        """Returns the settings of `given`, without keys that are ignored or switched off."""
        kept = {
            key: value
            for key, value in given.items()
            if key not in cls.ignored and value is not None and (value or key in cls.model_fields)
        }
        return cls.model_validate(kept)


class Method(Settings):
    """The settings of a method of quantisation."""

    @abstractmethod
    def weight_format(self) -> WeightFormat:
        """Returns the format of the weights that these settings describe."""


def inputs_of_group(size: int) -> int | None:
    """Returns the number of inputs that share a scale. Returns None for the value -1, with which
    all inputs share one scale. Raises ValueError for 0."""
    if size == 0:
        raise ValueError("group_size is 0")
    return None if size < 0 else size
