"""Fields of a body that the server knows but does not support. Such a field is accepted only with a
value that has no effect."""

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema


@dataclass(frozen=True, slots=True)
class Only:
    """Annotation of a field that accepts only None and values that have no effect. The value is
    checked before its type is checked: a refused value may be a long list, and checking its type
    would look at each item."""

    neutral: tuple[object, ...]

    def check(self, value: Any) -> Any:
        """Returns the value. Raises ValueError if the value is not None and not in `neutral`."""
        if value is not None and value not in self.neutral:
            accepted = ", ".join(map(repr, self.neutral))
            raise ValueError(
                "not supported yet" + (f"; only {accepted} is accepted" if accepted else "")
            )
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, _: core_schema.CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self.neutral]}


def only(*neutral: object) -> Only:
    """Returns the annotation of a field that accepts only None and the values `neutral`."""
    return Only(neutral)
