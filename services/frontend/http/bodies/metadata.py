"""Labels that a client gives to a request."""

from pydantic import BeforeValidator

MAX_METADATA = 16
"""Largest number of labels of a request, as in the OpenAI API."""


def _check_number(value: object) -> object:
    """Returns the value. Raises ValueError if it has more than `MAX_METADATA` labels. This check
    comes before pydantic validates the labels, because pydantic would make an error for each of a
    million wrong labels."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"has {len(value)} items; at most {MAX_METADATA} may be")
    return value


FEW_LABELS = BeforeValidator(_check_number)
"""Annotation of a field that has at most `MAX_METADATA` labels."""
