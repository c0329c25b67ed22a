"""Follows references (`$ref`) from one part of a schema to another.

References to other documents are not followed. A part with an `$id` is the root of a schema
resource (as the JSON Schema standard calls it), and references inside this resource start from its
root.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from services.frontend.request.json_schema.unenforced import Path
from services.frontend.request.json_schema.work import Work

DRAFTS_WITH_LONE_REFERENCES = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Texts that occur in `$schema` for the drafts in which other keywords in an object with `$ref` are
ignored."""


class ExternalReference(Exception):
    """Raised for a reference to a part of another document."""


class BrokenReference(Exception):
    """Raised for a reference to a part of the schema that does not exist."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a schema: its value, its path from the root of the whole schema, and the root of
    the schema resource that the part belongs to."""

    value: Any
    path: Path = ()
    root: Any = None
    """Root of the schema resource that the part belongs to: the part itself, or the nearest value
    around it, that has an `$id`; the whole schema if none has."""
    root_path: Path = ()

    def member(self, *names: str | int) -> "Part":
        """Returns the part at the path `names` within this part. The path consists of names of
        members and indices of lists."""
        part = self
        for name in names:
            value = part.value[name]
            part = Part(value, (*part.path, str(name)), part.root, part.root_path)
            if isinstance(value, dict) and _begins_resource(value):
                part = Part(value, part.path, value, part.path)
        return part


def whole(schema: Any) -> Part:
    """Returns the root part of a schema, which is the schema itself."""
    return Part(schema, (), schema, ())


class References:
    """Finds the targets of the references (`$ref`) in one schema."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._anchors: dict[int, dict[str, Part]] = {}
        """The parts that have an anchor, keyed by the anchor, for each schema resource that has
        been searched. The resources are keyed by the identity (`id`) of their root."""

    def target(self, part: Part) -> Part:
        """Returns the part to which the `$ref` of a part refers.

        Raises:
            ExternalReference: the reference leaves the document.
            BrokenReference: the reference leads to no part, or is not a text.
            WrongSchema: the schema takes too much work.
        """
        reference = part.value["$ref"]
        if not isinstance(reference, str):
            raise BrokenReference(reference)
        own = part.root.get("$id") if isinstance(part.root, dict) else None
        base, _, fragment = reference.partition("#")
        if base and base != str(own or "").partition("#")[0]:
            raise ExternalReference(reference)
        root = Part(part.root, part.root_path, part.root, part.root_path)
        if fragment and not fragment.startswith("/"):
            return self._anchored(root, fragment)
        found = root
        for token in fragment.split("/")[1:]:
            self.work.spend()
            found = _step(found, unquote(token).replace("~1", "/").replace("~0", "~"))
        return found

    def find(self, part: Part) -> Part | None:
        """Returns the part to which the `$ref` of a part refers. Returns None if the part has no
        `$ref`, or if the target is not in this document."""
        if not isinstance(part.value, dict) or "$ref" not in part.value:
            return None
        try:
            return self.target(part)
        except (ExternalReference, BrokenReference):
            return None

    def _anchored(self, root: Part, name: str) -> Part:
        anchors = self._anchors.get(id(root.value))
        if anchors is None:
            anchors = self._anchors[id(root.value)] = dict(self._all_anchors(root))
        if name not in anchors:
            raise BrokenReference(name)
        return anchors[name]

    def _all_anchors(self, root: Part) -> Iterator[tuple[str, Part]]:
        """Yields each part with an anchor in a schema resource, with the name of the anchor. Parts
        of other resources inside this resource are left out."""
        unseen = [root]
        while unseen:
            part = unseen.pop()
            self.work.spend()
            names: list[str | int] = []
            if isinstance(part.value, dict):
                names = [name for name in part.value if name not in ("const", "enum")]
                for keyword in ("$anchor", "$dynamicAnchor", "$id"):
                    if isinstance(name := part.value.get(keyword), str):
                        yield name.removeprefix("#"), part
            elif isinstance(part.value, list):
                names = list(range(len(part.value)))
            members = [part.member(name) for name in names]
            unseen += [member for member in members if member.root is root.root]


def replaces_siblings(schema: Any) -> bool:
    """Returns whether other keywords in an object with `$ref` are ignored in this schema, as in
    drafts of JSON Schema up to 7."""
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    return isinstance(draft, str) and any(one in draft for one in DRAFTS_WITH_LONE_REFERENCES)


def _step(part: Part, name: str) -> Part:
    value = part.value
    if isinstance(value, dict) and name in value:
        return part.member(name)
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        return part.member(int(name))
    raise BrokenReference(name)


def _begins_resource(schema: dict[str, Any]) -> bool:
    name = schema.get("$id")
    return isinstance(name, str) and not name.startswith("#")
