"""Accepts whole numbers that clients write with a fraction of zero, such as `3.0`, which is an
integer in JSON Schema. Pydantic reads bodies strictly and reports an error for such a number. The
number is then replaced by an integer, and the body is read again."""

from typing import Any

from pydantic import ValidationError

from services.frontend.http.bodies.type_errors import places_of

ERRORS = ("int_type", "int_from_float")
"""Types of the errors that pydantic reports where a value is not an integer."""

MAX_WHOLE = 2.0**63
"""Floats of at least this absolute value are not replaced by integers, even if their fraction is
zero."""

MAX_READINGS = 8
"""Largest number of times that a body is read. After each reading, all floats in a list with an
error are replaced together. Most bodies have only one list of numbers."""


def make_whole(error: ValidationError, body: Any) -> bool:
    """Replaces floats without a fraction by integers at the places where `error` reports that an
    integer is required. If such a place is in a list, all floats without a fraction in the list are
    replaced. Returns whether any number was replaced."""
    has_changed = False
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        places = places_of(item["loc"], body)
        if item["type"] not in ERRORS or not places:
            continue
        *path, last = places
        holder = body
        for place in path:
            holder = holder[place]
        # A list fails at its first wrong item, so all its numbers are replaced together.
        names = range(len(holder)) if isinstance(holder, list) else (last,)
        for name in names:
            value = holder[name]
            if isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE:
                holder[name] = int(value)
                has_changed = True
    return has_changed
