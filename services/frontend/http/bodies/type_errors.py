"""Converts errors of pydantic to messages for clients. A message names the field and says what the
value must be."""

import re
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.common import errors

MAX_NAME_LENGTH = 64
"""Largest number of characters of a client's field name that an error repeats."""

KINDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "null",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""Maps the types of pydantic's errors that concern the type of a value to descriptions of the
values that are allowed."""

SENTENCES = {
    "missing": "must be given",
    "value_error": "{error}",
    "too_long": "has {actual_length} items; at most {max_length} may be",
    "too_short": "must have at least {min_length} items",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "union_tag_invalid": "must have one of the types {expected_tags}",
    "union_tag_not_found": "must be an object with a type",
}
"""Maps the types of pydantic's errors that do not concern the type of a value to messages. Names in
braces are replaced by values from the context of the error."""

OTHER = "is of a wrong type"

MISSING = ("missing", "value_error")
"""Types of pydantic's errors that may concern a field which is absent from the body: a required
field is missing, or a check of this server has failed."""


_INDEX = re.compile(r"\.(\d+)(?=\.|$)")


def explain(
    error: ValidationError, body: object, *, has_brackets: bool = False
) -> errors.InvalidRequest:
    """Returns the first error of a body as an InvalidRequest. If the field allows several types,
    the message names all types. A place in a list is written as `messages.3`, or as `documents[3]`
    with `has_brackets`."""
    found = [
        (_json_path(item["loc"], body, is_missing=item["type"] in MISSING), item)
        for item in error.errors(include_url=False, include_input=False)
    ]
    first, _ = found[0]
    # If a value may be of several types, pydantic reports errors for each type. The error with the
    # longest path belongs to the type that the client meant.
    about = [path for path, _ in found if path[: len(first)] == first]
    path = max(about, key=len)
    reasons = [item for other, item in found if other == path]
    kinds = [_filled(KINDS[item["type"]], item) for item in reasons if item["type"] in KINDS]
    if kinds:
        message = f"must be {' or '.join(dict.fromkeys(kinds))}"
    else:
        message = _filled(SENTENCES.get(reasons[0]["type"], OTHER), reasons[0])
    field = ".".join(path)
    return errors.InvalidRequest(_INDEX.sub(r"[\1]", field) if has_brackets else field, message)


def _filled(words: str, item: ErrorDetails) -> str:
    context: dict[str, Any] = item.get("ctx", {})
    return words.format_map(context)


def _json_path(
    location: tuple[int | str, ...], body: object, *, is_missing: bool
) -> tuple[str, ...]:
    """Returns the path of the wrong value in the body as a tuple of names, such as `messages`, `0`
    and `role`. With `is_missing`, the last name is kept even if the body has no field of that
    name."""
    places = places_of(location, body, is_missing=is_missing)
    return tuple(str(place)[:MAX_NAME_LENGTH] for place in places)


def places_of(
    location: tuple[int | str, ...], body: object, *, is_missing: bool = False
) -> tuple[int | str, ...]:
    """Returns the names of fields and the positions in lists that lead to a value of the body.

    `location` is the location in an error of pydantic. It also has names of union members, which
    are not in the body and are left out of the result. With `is_missing`, the last name is kept
    even if the body lacks it.
    """
    path: list[int | str] = []
    value = body
    for depth, name in enumerate(location):
        is_missed = is_missing and depth == len(location) - 1
        if isinstance(value, dict) and (name in value or is_missed):
            value = value.get(name)
        elif isinstance(value, list) and isinstance(name, int):
            value = value[name]
        else:
            continue
        path.append(name)
    return tuple(path)
