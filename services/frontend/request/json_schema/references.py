"""References within a schema: `$ref` and the parts of the schema that can be referred to.

Only references to parts of the same document are followed. A `$id` inside the document begins
another resource, whose references begin at the resource's own root.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from services.frontend.request.json_schema.unenforced import Path

DRAFTS_WITH_LONE_REFERENCES = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Parts of `$schema` that name the drafts in which `$ref` has no effect beside other keywords but
replaces them."""


class ExternalReference(Exception):
    """A reference to a part of another document."""


class BrokenReference(Exception):
    """A reference to a part of the schema that does not exist."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a schema."""

    value: Any
    path: Path = ()
    root: Any = None
    """Resource that the part belongs to: the value with the nearest `$id` around the part."""
    root_path: Path = ()

    def member(self, *names: str | int) -> "Part":
        """Returns the part with the given name, or at the given index, within this part."""
        part = self
        for name in names:
            value = part.value[name]
            part = Part(value, (*part.path, str(name)), part.root, part.root_path)
            if isinstance(value, dict) and _begins_resource(value):
                part = Part(value, part.path, value, part.path)
        return part


def whole(schema: Any) -> Part:
    """Returns a whole schema as a part."""
    return Part(schema, (), schema, ())


def target(part: Part) -> Part:
    """Returns the part to which the `$ref` of a part refers.

    Raises:
        ExternalReference: the reference leaves the document, or is not a text.
        BrokenReference: there is no such part.
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
        return _anchored(root, fragment)
    found = root
    for token in fragment.split("/")[1:]:
        found = _step(found, unquote(token).replace("~1", "/").replace("~0", "~"))
    return found


def replaces_siblings(schema: Any) -> bool:
    """Returns whether `$ref` replaces the keywords beside it in this schema, as in drafts up to
    7."""
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    return isinstance(draft, str) and any(one in draft for one in DRAFTS_WITH_LONE_REFERENCES)


def _step(part: Part, name: str) -> Part:
    value = part.value
    if isinstance(value, dict) and name in value:
        return part.member(name)
    if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
        return part.member(int(name))
    raise BrokenReference(name)


def _anchored(root: Part, name: str) -> Part:
    for part in _parts(root):
        value = part.value
        if isinstance(value, dict) and name in (
            value.get("$anchor"),
            value.get("$dynamicAnchor"),
            str(value.get("$id", "")).removeprefix("#"),
        ):
            return part
    raise BrokenReference(name)


def _parts(root: Part) -> Iterator[Part]:
    """Yields the parts of a resource, without other resources in it."""
    unseen = [root]
    while unseen:
        part = unseen.pop()
        yield part
        names: list[str | int] = []
        if isinstance(part.value, dict):
            names = [name for name in part.value if name not in ("const", "enum")]
        elif isinstance(part.value, list):
            names = list(range(len(part.value)))
        members = [part.member(name) for name in names]
        unseen += [member for member in members if member.root is root.root]


def _begins_resource(schema: dict[str, Any]) -> bool:
    name = schema.get("$id")
    return isinstance(name, str) and not name.startswith("#")
