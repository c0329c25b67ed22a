"""A part of a schema during the translation: the client's keywords, and the translated keywords."""

from typing import Any, Protocol

from services.frontend.request.json_schema.members import is_combined
from services.frontend.request.json_schema.references import Part, References
from services.frontend.request.json_schema.unenforced import Path, Unenforced
from services.frontend.request.json_schema.work import WrongSchema

Json = Any


class Translating(Protocol):
    """The translation of the whole schema, as far as a `SchemaPart` uses it."""

    closes: bool
    """Whether an object whose schema declares members may have only these members, unless the
    schema allows others."""
    reported: dict[Unenforced, None]
    """Keywords that are not enforced, in the order in which they were found."""
    references: References

    def schema(self, place: Part, *, closes: bool, depth: int) -> Json:
        """Returns the translation of a part that is a schema. `closes` says whether all members of
        the object are declared within this part, and `depth` says how deeply the part is nested."""

    def reference(self, place: Part, *, closes: bool) -> Json:
        """Returns a reference to the translated target of a part's `$ref`. Returns `True` if the
        target is in another document."""


class SchemaPart:
    """A part of a schema during the translation, with the keywords that are translated so far."""

    def __init__(self, translation: Translating, place: Part, *, closes: bool, depth: int) -> None:
        """`closes` says whether all members of the object are declared within this part. If so, the
        part may forbid other members."""
        self.translation = translation
        self.place = place
        self.schema: dict[str, Json] = place.value
        self.closes = closes
        self.depth = depth
        self.out: dict[str, Json] = {}
        """The keywords that have been translated so far."""
        self.has_several = is_combined(self.schema)
        """Whether the part combines several schemas that apply to the same value."""
        self.is_combined = self.has_several or not closes
        """Whether several schemas apply to the same value: schemas that this part combines, or one
        that combines this part with others."""
        self.branches_close = closes and not self.has_several
        """Whether all members of the object are declared within each schema that this part combines
        by `allOf`, `anyOf` or `oneOf`, so each of these schemas may forbid other members."""

    def report(self, keyword: str) -> None:
        """Notes that a keyword is not enforced."""
        self.translation.reported[Unenforced(self.place.path, keyword)] = None

    def member(self, *names: str | int, closes: bool | None = None) -> Json:
        """Returns the translation of the schema at the path `names` within this part."""
        return self.translation.schema(
            self.place.member(*names),
            closes=self.translation.closes if closes is None else closes,
            depth=self.depth + 1,
        )

    def wrong(self, keyword: str, what: str) -> WrongSchema:
        """Returns the error for a wrong value of a keyword. `what` is a text that says what the
        value must be."""
        return WrongSchema(f"'{keyword}' at {place_name(self.place.path)} must be {what}")


def place_name(path: Path) -> str:
    """Returns the path of a part of a schema as a text for error messages, such as
    `properties.a`."""
    return ".".join(path) or "the root"
