"""Parses the text of a request's field as a JSON object."""

from typing import Any

import pydantic_core

from services.common import errors


def read_json_object(field: str, text: str) -> dict[str, Any]:
    """Returns the JSON object in a text. `field` is the name of the field in errors.

    Raises:
        InvalidRequest: the text is not a JSON object.
    """
    try:
        value = pydantic_core.from_json(text)
    except ValueError as error:
        raise errors.InvalidRequest(field, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise errors.InvalidRequest(field, "must be a JSON object")
    return value
