"""A JSON schema as a client has written it, with what of it is enforced."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from services.common import errors
from services.frontend.request.json_schema.translations import TRANSLATIONS, Translated
from services.frontend.request.json_schema.unenforced import Unenforced
from services.frontend.request.json_schema.work import WrongSchema

AdditionalProperties = Literal["declared", "allowed"]
"""Members of an object whose schema has `properties` and says nothing of others: only the declared
ones, or any, as JSON Schema has it."""


@dataclass(frozen=True, eq=False)
class ClientSchema:
    """A JSON schema of a client."""

    schema: Mapping[str, Any]
    field: str
    """Field of the request that has the schema."""
    is_strict: bool = False
    """Whether the request is refused if a keyword cannot be enforced."""
    additional_properties: AdditionalProperties = "declared"
    parameters: str = ""
    """The parameters of the tool from which the schema was made, as text; empty if it belongs to no
    tool. Tools come with every turn, so the translations of their schemas are kept."""
    not_in_format: tuple[Unenforced, ...] = ()
    """Keywords that the model's format of tool calls cannot enforce, although JSON could."""

    @cached_property
    def _translation(self) -> Translated:
        closes = self.additional_properties == "declared"
        try:
            found = TRANSLATIONS.of(self.schema, self.parameters, closes=closes)
        except WrongSchema as error:
            raise errors.InvalidRequest(self.field, str(error)) from None
        if self.is_strict and found.reported:
            raise errors.InvalidRequest(self.field, f"{found.reported[0]} cannot be enforced")
        return found

    @property
    def enforced(self) -> dict[str, Any]:
        """The schema that the grammar engine enforces.

        Raises:
            InvalidRequest: the schema is wrong, or is strict and has a keyword that cannot be
            enforced. The error names the keyword and its place.
        """
        found = self._translation.enforced
        return found if isinstance(found, dict) else ({} if found else {"enum": []})

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        """Keywords that are not enforced. `enforced` describes the errors."""
        return tuple(dict.fromkeys((*self._translation.reported, *self.not_in_format)))

    @property
    def unenforced_names(self) -> tuple[str, ...]:
        """Names of the keywords that are not enforced. A name contains the request's field and the
        path in the schema."""
        return tuple(one.name_in(self.field) for one in self.unenforced)

    @cached_property
    def text(self) -> str:
        """The schema as JSON."""
        return json.dumps(self.schema, ensure_ascii=False)
