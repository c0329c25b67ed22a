"""A JSON schema that a client has written, and the parts of it that are enforced."""

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
"""Which members an object may have besides its `properties`, if the schema does not say: none
(`declared`), or any members, as the JSON Schema standard says (`allowed`)."""


@dataclass(frozen=True, eq=False)
class ClientSchema:
    """A JSON schema of a client. Translates the schema to the part that the grammar engine
    enforces."""

    schema: Mapping[str, Any]
    field: str
    """Field of the request that has the schema."""
    is_strict: bool = False
    """Whether the request is refused if a keyword cannot be enforced."""
    additional_properties: AdditionalProperties = "declared"
    parameters: str = ""
    """JSON text of the tool's parameters from which the schema was made; empty if the schema
    belongs to no tool. The translation of such a schema is cached, because clients send the same
    tools with every turn."""
    not_in_format: tuple[Unenforced, ...] = ()
    """Keywords that the model's format of tool calls cannot enforce, although a format in JSON
    could."""

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
        """The part of the schema that the grammar engine enforces. This part is a complete schema
        itself.

        Raises:
            InvalidRequest: the schema is wrong, or is strict and has a keyword that cannot be
            enforced. The error names the keyword and its place.
        """
        found = self._translation.enforced
        return found if isinstance(found, dict) else ({} if found else {"enum": []})

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        """Keywords that are not enforced. Raises the same errors as `enforced`."""
        return tuple(dict.fromkeys((*self._translation.reported, *self.not_in_format)))

    @property
    def unenforced_names(self) -> tuple[str, ...]:
        """Names of the keywords that are not enforced. A name consists of the request's field, the
        path in the schema and the keyword."""
        return tuple(one.name_in(self.field) for one in self.unenforced)

    @cached_property
    def text(self) -> str:
        """The schema as a JSON text."""
        return json.dumps(self.schema, ensure_ascii=False)
