"""Parses a body in JSON as a pydantic model, and explains errors to clients."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from services.common import errors
from services.frontend.http.bodies.client_fields import CLIENT_FIELDS
from services.frontend.http.bodies.object_kinds import IndexedModel, LeftOutItem
from services.frontend.http.bodies.type_errors import MAX_NAME_LENGTH, explain
from services.frontend.http.bodies.whole_numbers import MAX_READINGS, make_whole

Body = TypeVar("Body", bound=BaseModel)

MAX_UNKNOWN = 16
"""Largest number of unknown fields, and of items that are left out of the prompt, that are reported
for one body."""

OnUnknown = Callable[[tuple[str, ...]], None]
"""Type of a function that takes the paths of a body's unknown fields, and of the items that are
left out of the prompt. Paths leave out positions in lists: `messages.mood`. The path of an item
ends with the type of the item: `messages.content.fallback`."""


def parse_body(kind: type[Body], data: bytes, on_unknown: OnUnknown = lambda _: None) -> Body:
    """Parses a body in JSON as the model `kind`, and removes its unknown fields at every depth. If
    the body has unknown fields, or items that the server leaves out of the prompt because it does
    not support their type, `on_unknown` is called with the paths of these fields and items, at most
    `MAX_UNKNOWN` of them. `on_unknown` may raise an error to refuse the body.

    Raises:
        InvalidRequest: the body is not a JSON object in UTF-8, a field is missing, or a value is of
        the wrong type or not allowed.
    """
    try:
        value = pydantic_core.from_json(data)
    except ValueError as error:
        raise errors.InvalidRequest("body", f"must be JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise errors.InvalidRequest("body", "must be a JSON object")
    body = _read(kind, value)
    unknown: dict[str, None] = {}
    _take_unknown(body, "", unknown)
    if unknown:
        on_unknown(tuple(unknown))
    return body


def _read(kind: type[Body], value: dict[str, Any]) -> Body:
    for reading in range(1, MAX_READINGS + 1):
        try:
            # Unknown fields are allowed at first: making an error for each of thousands is slow.
            return kind.model_validate(value, extra="allow")
        except ValidationError as error:
            if reading == MAX_READINGS or not make_whole(error, value):
                has_brackets = issubclass(kind, IndexedModel)
                raise explain(error, value, has_brackets=has_brackets) from None
    raise AssertionError("the last reading returns or raises")


def _take_unknown(value: object, path: str, found: dict[str, None]) -> None:
    """Removes the unknown fields of all models in a value. Adds the paths of the removed fields,
    and of the items that are left out of the prompt, to `found`, which gets at most `MAX_UNKNOWN`
    paths."""
    if isinstance(value, BaseModel):
        extra = value.__pydantic_extra__ or {}
        _note((value.type,) if isinstance(value, LeftOutItem) else extra, path, found)
        extra.clear()
        for name, field in value.__dict__.items():
            if field is not None and isinstance(field, (BaseModel, list)):
                _take_unknown(field, f"{path}{name}.", found)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for item in value:
            _take_unknown(item, path, found)


def _note(names: Iterable[str], path: str, found: dict[str, None]) -> None:
    """Adds `path` followed by each name to `found`. Leaves out paths in `CLIENT_FIELDS`, and adds
    nothing once `found` has `MAX_UNKNOWN` paths."""
    paths = (f"{path}{name[:MAX_NAME_LENGTH]}" for name in names)
    for unknown in islice((one for one in paths if one not in CLIENT_FIELDS), MAX_UNKNOWN):
        if len(found) < MAX_UNKNOWN:
            found[unknown] = None
