"""Parses settings that may have a value for each model: `VALUE`, or `NAME=VALUE` for the model
NAME.

    demo=/models/demo,code=/models/code      a value for each of two models
    hermes,code=qwen3_coder                  a value for all models, and another one for `code`

The values are separated by commas, or the command-line option is given several times. A name does
not begin with `/`, `.` or `~`, and has no `=`. So a relative path that has an `=` is written as
`./PATH`. A comma separates two values only if `NAME=`, `/`, `.` or `~` follows the comma, because
addresses of gRPC have commas, too.
"""

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, StringConstraints
from pydantic_settings import NoDecode

Value = TypeVar("Value")

_NAMED = re.compile(r"(?P<name>[^=,\s/.~][^=,\s]*)=(?P<value>.*)", re.DOTALL)
SEPARATOR = re.compile(r",(?=[/.~]|[^=,\s/.~][^=,\s]*=)")
"""Pattern of a comma that separates two values of a setting."""


def _pairs_in(value: object) -> object:
    """Returns the value of a setting as pairs of a model's name and a value. `value` is a text, or
    a list of texts and of such pairs. A value for all models has the empty name; anything that is
    neither a text nor a pair is a value for all models, too."""
    items = value if isinstance(value, list | tuple) else (value,)
    pairs: list[object] = []
    for item in items:
        texts = SEPARATOR.split(item) if isinstance(item, str) else (item,)
        pairs += [_pair(text) for text in texts]
    return tuple(pairs)


def _pair(item: object) -> object:
    match item:
        case tuple() | list():
            return item
        case str():
            return pair_in(item)
    return ("", item)


def pair_in(text: str) -> tuple[str, str]:
    """Splits `NAME=VALUE` into the name and the value. The name is empty if the text has no
    name."""
    named = _NAMED.fullmatch(text)
    return ("", text) if named is None else (named["name"], named["value"])


def _without_repetition(pairs: tuple[tuple[str, Value], ...]) -> tuple[tuple[str, Value], ...]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            whose = f"the model {name}" if name else "all models"
            raise ValueError(f"has several values for {whose}; a value for one is NAME=VALUE")
    return pairs


ModelKey = Annotated[str, StringConstraints(pattern=r"^[!-+\--~]{0,128}$")]
"""Type of the name of a model, or the empty text for all models."""

ByModel = Annotated[
    tuple[tuple[ModelKey, Value], ...],
    NoDecode,
    BeforeValidator(_pairs_in),
    AfterValidator(_without_repetition),
]
"""Type of a setting that may have a value for each model: pairs of name and value."""


def for_all(value: Value) -> tuple[tuple[str, Value], ...]:
    """Returns a setting in which `value` is the value for all models."""
    return (("", value),)


def names_in(pairs: tuple[tuple[str, Value], ...]) -> tuple[str, ...]:
    """Returns the names of the models that have a value of their own."""
    return tuple(name for name, _ in pairs if name)


def value_for(name: str, pairs: tuple[tuple[str, Value], ...]) -> Value | None:
    """Returns the value for the model `name`. If the model has no value of its own, returns the
    value for all models. Returns None if there is no such value either."""
    values: Mapping[str, Value] = dict(pairs)
    return values.get(name, values.get(""))
