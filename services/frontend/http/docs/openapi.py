"""The OpenAPI document of the HTTP API, made from the table of routes.

Bodies are described by the models that read them, and answers by the types that replies build. The
document cannot describe what depends on the model, such as the vocabulary, the length and the chat
template.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from pydantic.json_schema import JsonSchemaValue

from services.frontend.http.docs.components import SECURITY_SCHEMES, error_responses
from services.frontend.http.docs.operation import dialect_of, error_statuses, operation
from services.frontend.http.docs.schemas import schema_of_type
from services.frontend.http.openai import errors as openai_errors
from services.frontend.http.protocol.route import Route

OPENAPI_VERSION = "3.1.0"
API_VERSION = "1"
"""Version of the HTTP API: the number in paths such as `/v1/models`."""

Schemas = dict[str, JsonSchemaValue]
"""Type of a collection of JSON schemas, keyed by name."""


def document(
    routes: Sequence[Route], *, needs_key: bool, refuses_unknown: bool = False
) -> dict[str, Any]:
    """Returns the OpenAPI document of the routes that have a name. `needs_key` says whether clients
    must send an API key. `refuses_unknown` says whether bodies with unknown fields are refused."""
    named = tuple(route for route in routes if route.name)
    statuses = dict.fromkeys(
        (status, dialect_of(route))
        for route in named
        for status in error_statuses(route, needs_key=needs_key)
    )
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Orcinus",
            "version": API_VERSION,
            "description": "The OpenAI API of a served language model.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": {
            route.path.replace(":path", ""): {
                route.method.lower(): operation(route, needs_key=needs_key)
            }
            for route in named
        },
        "components": {
            "schemas": _schemas(named, refuses_unknown=refuses_unknown),
            "responses": error_responses(statuses, openai_errors.DIALECT),
            "securitySchemes": SECURITY_SCHEMES,
        },
    }


@cache
def _schemas(routes: tuple[Route, ...], *, refuses_unknown: bool) -> Schemas:
    """Returns the schemas of all bodies and answers of the routes, keyed by name. If
    `refuses_unknown` is false, the schemas of bodies allow additional fields. The schemas take long
    to make, so the result is cached and must not be changed."""
    schemas = _schemas_of(route.body for route in routes)
    if not refuses_unknown:
        for schema in schemas.values():
            if schema.get("additionalProperties") is False:
                del schema["additionalProperties"]
    answers = (
        kind for route in routes for kind in (route.answer, route.chunk, dialect_of(route).schema)
    )
    return schemas | _schemas_of(answers)


def _schemas_of(kinds: Iterable[Any]) -> Schemas:
    schemas: Schemas = {}
    for kind in kinds:
        if kind is not None and kind.__name__ not in schemas:
            schema = schema_of_type(kind, ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs", {}), kind.__name__: schema}
    return schemas
