"""Translates a client's schema into one that the grammar engine enforces, keyword by keyword.

Each keyword has a rule (`keyword_rules`, `object_rules`). Keywords without a rule are annotations,
which constrain nothing. Each schema that a `$ref` refers to becomes a definition in the translated
schema.
"""

from services.frontend.request.json_schema.circles import Circles
from services.frontend.request.json_schema.keyword_rules import (
    RULES,
    UNENFORCED,
    is_never,
    is_without_effect,
)
from services.frontend.request.json_schema.members import COMBINING
from services.frontend.request.json_schema.object_rules import translate_object
from services.frontend.request.json_schema.references import (
    BrokenReference,
    ExternalReference,
    Part,
    References,
    replaces_siblings,
    whole,
)
from services.frontend.request.json_schema.schema_part import (
    Json,
    SchemaPart,
    place_name,
)
from services.frontend.request.json_schema.unenforced import Unenforced
from services.frontend.request.json_schema.work import Work, WrongSchema

MAX_DEPTH = 96
"""Largest depth of nested schemas. Deeper schemas are refused."""


class Translation:
    """Translates one schema. The result is the enforced schema, and the keywords that are not
    enforced."""

    def __init__(self, schema: Json, *, closes: bool) -> None:
        """If `closes` is true, an object whose schema declares members may have no other members,
        unless the schema allows them explicitly.

        Raises:
            WrongSchema: the schema is wrong, or too large.
        """
        self.closes = closes
        self.reported: dict[Unenforced, None] = {}
        """Keywords that are not enforced, in the order in which they were found."""
        self._ignores_siblings = replaces_siblings(schema)
        self._definitions: dict[tuple[int, bool], str] = {}
        self._pending: list[tuple[str, Part, bool]] = []
        self.references = References(Work())
        self._circles = Circles(self.references)
        self.enforced: Json = self.schema(whole(schema), closes=closes, depth=0)
        """The schema that the engine enforces."""
        translated: dict[str, Json] = {}
        while self._pending:
            name, place, closes_part = self._pending.pop()
            translated[name] = self.schema(place, closes=closes_part, depth=0)
        if translated:
            self.enforced = {**self.enforced, "$defs": translated}

    def schema(self, place: Part, *, closes: bool, depth: int) -> Json:
        """Returns the translation of a part that is a schema. `closes` says whether all members of
        the object are declared within this part. If so, the part may forbid other members."""
        self.references.work.spend()
        if depth > MAX_DEPTH:
            raise WrongSchema("is nested too deeply")
        if isinstance(place.value, bool):
            return place.value
        if not isinstance(place.value, dict):
            raise WrongSchema(f"{place_name(place.path)} must be a schema")
        part = SchemaPart(self, place, closes=closes, depth=depth)
        if "$ref" in part.schema and self._ignores_siblings:
            return self.reference(place, closes=closes)
        if is_never(part.schema):
            return False
        for keyword, rule in RULES.items():
            if keyword in part.schema:
                rule(part, keyword, part.schema[keyword])
        for keyword in part.schema:
            if keyword in UNENFORCED and not is_without_effect(keyword, part.schema):
                part.report(keyword)
        translate_object(part)
        self._drop_circles(part)
        return part.out

    def _drop_circles(self, part: SchemaPart) -> None:
        """Drops `$ref`, `allOf`, `anyOf` and `oneOf` from a part if they lead back to the part
        itself, and reports them as not enforced. A part with only one keyword is not changed,
        because the engine follows such a reference."""
        found = [keyword for keyword in ("$ref", *COMBINING) if keyword in part.out]
        if found and len(part.out) > 1 and self._circles.is_circular(part.place):
            for keyword in found:
                del part.out[keyword]
            for keyword in part.schema.keys() & {"$ref", *COMBINING}:
                part.report(keyword)

    def reference(self, place: Part, *, closes: bool) -> Json:
        """Returns a reference to the translated target of a part's `$ref`. Returns `True` if the
        target is in another document.

        Raises:
            WrongSchema: the target does not exist.
        """
        try:
            found = self.references.target(place)
        except ExternalReference:
            self.reported[Unenforced(place.path, "$ref")] = None
            return True
        except BrokenReference:
            raise WrongSchema(f"'$ref' at {place_name(place.path)} refers to nothing") from None
        key = id(found.value), closes
        name = self._definitions.get(key)
        if name is None:
            name = self._definitions[key] = str(len(self._definitions))
            self._pending.append((name, found, closes))
        return {"$ref": f"#/$defs/{name}"}
