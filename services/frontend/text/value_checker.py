"""Checks whether a finished value matches a JSON schema, including the keywords that no grammar
enforces.

References to other documents are not followed: neither files nor the network are read. This module
does not limit the time for regular expressions or for large values; `grammar_checker` limits the
process that calls this module.
"""

import json
from typing import Any, NoReturn

import jsonschema_rs

MAX_BACKTRACKING = 1_000_000
"""Largest number of steps by which the search for a match of a regular expression may backtrack."""


class CannotCheck(ValueError):
    """Raised if the schema is wrong, or refers to another document."""


def is_valid(schema: str, value: str) -> bool:
    """Returns whether the text `value` is JSON that matches `schema`, which is also JSON text. The
    keyword `format` constrains nothing.

    Raises:
        CannotCheck: the schema cannot be used.
    """
    validator = _validator(json.loads(schema))
    try:
        read = json.loads(value, parse_constant=_refuse)
    except ValueError:
        return False
    return validator.is_valid(read)


def _validator(schema: Any) -> jsonschema_rs.Validator:
    """Returns a validator for the draft of JSON Schema that the schema names. If the schema names
    none, the newest draft is used, or draft 7 if the schema is not valid in the newest."""
    options: dict[str, Any] = {
        "validate_formats": False,
        "offline": True,
        "pattern_options": jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKING),
    }
    try:
        return jsonschema_rs.validator_for(schema, **options)
    except ValueError as error:
        if "$schema" in schema:
            raise CannotCheck(str(error)) from error
    try:
        return jsonschema_rs.Draft7Validator(schema, **options)
    except ValueError as error:
        raise CannotCheck(str(error)) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
