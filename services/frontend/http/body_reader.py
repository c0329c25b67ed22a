"""Bodies of the HTTP API, read from JSON, and what is wrong with them in words for clients."""

from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from services.common import errors

Body = TypeVar("Body", bound=BaseModel)

MAX_NAME_LENGTH = 64
"""Characters of a client's field name that are repeated in an error."""


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Reads a body.

    Raises:
        InvalidRequest: it is not JSON in UTF-8, or a field is missing, unknown or of the wrong
        type.
    """
    try:
        value = pydantic_core.from_json(data)
    except ValueError as error:
        raise errors.InvalidRequest("body", f"must be JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise errors.InvalidRequest("body", "must be a JSON object")
    for name in value:  # before validation, which would make an error for each of a million
        if name not in kind.model_fields:
            raise errors.InvalidRequest(name[:MAX_NAME_LENGTH], "unknown field")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error, value) from None


def _explain(error: ValidationError, body: object) -> errors.InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    return errors.InvalidRequest(_json_path(first["loc"], body), message)


def _json_path(location: tuple[int | str, ...], body: object) -> str:
    """Returns where in the body an error is, `messages.0.role` for example.

    Pydantic puts names of union members between the body's own; what is in the body stays, and so
    does the last name, which may be one that is missing.
    """
    path, value = [], body
    for depth, name in enumerate(location):
        is_last = depth == len(location) - 1
        if isinstance(value, dict) and (name in value or is_last):
            value = value.get(name)
        elif isinstance(value, list) and isinstance(name, int):
            value = value[name]
        else:
            continue
        path.append(str(name)[:MAX_NAME_LENGTH])
    return ".".join(path)
