"""The ranges of a body's fields, as annotations for the OpenAPI document.

Options of sampling, counts and formats are checked in one place for all protocols, by the classes
`GenerationRequest` and `SamplingParams`. The models of bodies do not check ranges. The annotations
therefore check nothing and only document the ranges.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from services.common.priority import PRIORITIES
from services.common.sampling import (
    MAX_LOGPROBS,
    OPTIONS,
    Numbers,
    Option,
    SamplingParams,
    TokenBiases,
    TokenLists,
    WholeNumbers,
)
from services.frontend.http.bodies.field_docs import field_docs
from services.frontend.request.generation_request import MAX_N, MAX_SALT_LENGTH, MAX_TOKENS
from services.frontend.request.truncation import WHOLE

TOKEN_NAME = "^(0|[1-9][0-9]{0,8})$"
"""Pattern of the keys of an object whose keys are token ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Within:
    """Annotation that adds keywords of a JSON schema, such as `minimum`, to the documentation of a
    field. The keywords do not apply to null."""

    keywords: Mapping[str, Any]
    option: str | None = None
    """Name of the option of `SamplingParams` that the field sets, or None. The field gets the
    description of the option."""

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler(schema)
        first, *_ = described.get("anyOf", [described])
        first |= self.keywords
        if self.option is not None:
            described["description"] = field_docs(SamplingParams)[self.option]
        return described


def between(allowed: Numbers | WholeNumbers) -> Within:
    """Returns the annotation of a field whose values are in the range `allowed`."""
    return Within({"minimum": allowed.low, "maximum": allowed.high})


def option(name: str) -> Within:
    """Returns the annotation of a field for the option `name` of `SamplingParams`. The annotation
    has the option's range."""
    return Within(_keywords(OPTIONS[name]), name)


def _keywords(option: Option) -> Mapping[str, Any]:
    match option.allowed:
        case TokenLists(max_length):
            return {"maxItems": max_length}
        case TokenBiases(max_length, low, high):
            return {
                "type": "object",
                "propertyNames": {"pattern": TOKEN_NAME},
                "additionalProperties": {"type": "number", "minimum": low, "maximum": high},
                "maxProperties": max_length,
            }
        case Numbers() | WholeNumbers() as allowed:
            return between(allowed).keywords
        case _:
            return {}


N_ANSWERS = Within({"minimum": 1, "maximum": MAX_N})
N_LOGPROBS = Within({"minimum": 0, "maximum": MAX_LOGPROBS})
N_TOKENS = between(MAX_TOKENS)
PRIORITY = between(PRIORITIES)
TRUNCATION = Within({"minimum": WHOLE})
SALT = Within({"maxLength": MAX_SALT_LENGTH})
NOT_EMPTY = Within({"minItems": 1})
