"""The errors of pydantic in words for clients: which field, and what it must be."""

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
"""What a value must be, by the type of error; of several types that are allowed, each has one."""

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
"""What else may be wrong, by the type of error."""

OTHER = "is of a wrong type"

MISSING = ("missing", "value_error")
"""Types of errors whose field may be absent: it must be given, or a check of this server fails."""


def explain(error: ValidationError, body: object) -> errors.InvalidRequest:
    """Returns what is wrong with a body: the first error, with all that the field may be."""
    found = [
        (_json_path(item["loc"], body, is_missing=item["type"] in MISSING), item)
        for item in error.errors(include_url=False, include_input=False)
    ]
    first, _ = found[0]
    # Where a value may be of several types, there is an error for each. The one that lies deepest
    # is of the type that was meant.
    about = [path for path, _ in found if path[: len(first)] == first]
    path = max(about, key=len)
    reasons = [item for other, item in found if other == path]
    kinds = [_filled(KINDS[item["type"]], item) for item in reasons if item["type"] in KINDS]
    if kinds:
        message = f"must be {' or '.join(dict.fromkeys(kinds))}"
    else:
        message = _filled(SENTENCES.get(reasons[0]["type"], OTHER), reasons[0])
    return errors.InvalidRequest(".".join(path), message)


def _filled(words: str, item: ErrorDetails) -> str:
    context: dict[str, Any] = item.get("ctx", {})
    return words.format_map(context)


def _json_path(
    location: tuple[int | str, ...], body: object, *, is_missing: bool
) -> tuple[str, ...]:
    """Returns the path in the body at which an error is, `messages.0.role` for example.

    Pydantic puts names of union members between the body's own names. Names that are in the body
    stay, and so does the last name if it is the name of a field that is missing.
    """
    path, value = [], body
    for depth, name in enumerate(location):
        is_missed = is_missing and depth == len(location) - 1
        if isinstance(value, dict) and (name in value or is_missed):
            value = value.get(name)
        elif isinstance(value, list) and isinstance(name, int):
            value = value[name]
        else:
            continue
        path.append(str(name)[:MAX_NAME_LENGTH])
    return tuple(path)
