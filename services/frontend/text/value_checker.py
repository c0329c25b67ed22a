"""Checks whether a finished value matches a JSON schema, for the keywords that no grammar enforces.

References to other documents are not followed: neither files nor the network are read. The regular
expressions of a schema, and the work on the value, are not limited here; `grammar_checker`
limits the process that calls this module.
"""

import json
from typing import Any, NoReturn

import jsonschema_rs

MAX_BACKTRACKING = 1_000_000
"""Largest number of steps that the search for a match of a regular expression may go back."""


class CannotCheck(ValueError):
    """The schema is wrong, or refers to another document."""


def is_valid(schema: str, value: str) -> bool:
    """Returns whether a text is JSON that matches a schema, which is given as JSON. Formats are
    annotations.

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
    """Returns a validator of the draft that the schema names. A schema that names none belongs to
    the newest draft, or to draft 7 if the newest does not allow it."""
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
