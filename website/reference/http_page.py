"""The page of the HTTP API: the frontend's OpenAPI document in Markdown.

The tables are those of the page that a frontend shows at `/docs`.
"""

from typing import Any

from services.frontend.http.docs.page import operation_table, schema_table

INTRODUCTION = """\
# HTTP, from OpenAPI

This page is for authors of clients who look for the type of a field. It is the OpenAPI document of
a frontend ([`openapi.json`](openapi.json)), which each frontend shows at `/docs`, too.
[The API](../api.md) says what fields mean. Fields with a star must be given.
"""


def http_page(document: dict[str, Any]) -> str:
    """Returns the page of an OpenAPI document."""
    operations = "".join(
        f"\n### `{method.upper()} {path}`\n\n{operation['summary']}\n\n"
        f"{operation_table(operation)}\n"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(
        f"\n### `{name}` {{#{name}}}\n\n{schema.get('description', '')}\n\n{schema_table(schema)}\n"
        for name, schema in document["components"]["schemas"].items()
    )
    return f"{INTRODUCTION}\n## Paths\n{operations}\n## Bodies and answers\n{schemas}"
