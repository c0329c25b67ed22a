"""Finds circular references, by which a part of a schema contains itself.

The grammar engine follows such a reference only if it is the only keyword of its schema.
"""

from services.frontend.request.json_schema.members import COMBINING
from services.frontend.request.json_schema.references import Part, References


class Circles:
    """Finds circular references in one schema."""

    def __init__(self, references: References) -> None:
        self._references = references

    def is_circular(self, place: Part) -> bool:
        """Returns whether a part of a schema is circular. A part is circular if one of its
        references, or of the references in schemas that it combines by keywords such as `allOf`,
        leads to a schema that contains the part itself. Raises WrongSchema if the schema takes too
        much work."""
        unseen = [found for part in self._combined(place) for found in self._targets(part)]
        seen: set[int] = set()
        while unseen:
            part = unseen.pop()
            if part.value is place.value:
                return True
            if id(part.value) in seen or not isinstance(part.value, dict | list):
                continue
            seen.add(id(part.value))
            self._references.work.spend()
            names = range(len(part.value)) if isinstance(part.value, list) else part.value
            unseen += [part.member(name) for name in names]
            unseen += self._targets(part)
        return False

    def _combined(self, place: Part) -> list[Part]:
        """Returns a part and all parts that `allOf`, `anyOf` or `oneOf` combine with it, directly
        or indirectly."""
        found = [place]
        for part in found:
            self._references.work.spend()
            for keyword in COMBINING:
                branches = part.value.get(keyword)
                if isinstance(branches, list):
                    members = (part.member(keyword, index) for index in range(len(branches)))
                    found += [member for member in members if isinstance(member.value, dict)]
        return found

    def _targets(self, part: Part) -> list[Part]:
        found = self._references.find(part)
        return [] if found is None else [found]
