"""Circular references: parts of a schema that occur inside themselves.

The engine follows a circular reference only where no other keyword stands beside the reference.
"""

from services.frontend.request.json_schema.members import COMBINING
from services.frontend.request.json_schema.references import (
    BrokenReference,
    ExternalReference,
    Part,
    target,
)

MAX_STEPS = 200_000
"""Largest number of parts that are looked at in one schema. Beyond it, references are taken for
circular."""


class Circles:
    """Finds circular references in one schema."""

    def __init__(self) -> None:
        self._n_left = MAX_STEPS

    def is_circular(self, place: Part) -> bool:
        """Returns whether a part combines a schema, by a reference, that contains the part."""
        unseen = [found for part in _combined(place) for found in _targets(part)]
        seen: set[int] = set()
        while unseen:
            part = unseen.pop()
            if part.value is place.value:
                return True
            if id(part.value) in seen or not isinstance(part.value, dict | list):
                continue
            seen.add(id(part.value))
            self._n_left -= 1
            if self._n_left < 0:
                return True
            names = range(len(part.value)) if isinstance(part.value, list) else part.value
            unseen += [part.member(name) for name in names]
            unseen += _targets(part)
        return False


def _combined(place: Part) -> list[Part]:
    """Returns a part and the parts that it combines."""
    found = [place]
    for part in found:
        if len(found) > MAX_STEPS or not isinstance(part.value, dict):
            break
        for keyword in COMBINING:
            branches = part.value.get(keyword)
            if isinstance(branches, list):
                members = (part.member(keyword, index) for index in range(len(branches)))
                found += [member for member in members if isinstance(member.value, dict)]
    return found


def _targets(part: Part) -> list[Part]:
    """Returns the part that a part refers to, if there is one."""
    if not isinstance(part.value, dict) or "$ref" not in part.value:
        return []
    try:
        return [target(part)]
    except (ExternalReference, BrokenReference):
        return []
