"""Renders the OpenAPI document as a page: one HTML text without scripts.

The pages of well-known tools load megabytes of JavaScript from other servers. This page loads
nothing, and a content security policy forbids the browser to load anything.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font:14px ui-monospace,monospace}table{border-collapse:collapse;width:100%}"
    "td,th{text-align:left;vertical-align:top;padding:.25rem .5rem;border-bottom:1px solid #ccc}"
    "td:first-child{white-space:nowrap}h2{margin-top:2.5rem}"
)

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""HTTP headers of the page."""

_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} items",
}


def render(document: dict[str, Any]) -> str:
    """Returns the HTML page that shows an OpenAPI document."""
    info = document["info"]
    title = escape(f"{info['title']} API")
    paths = "".join(
        _operation(path, method, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    schemas = "".join(
        _schema(name, schema) for name, schema in document["components"]["schemas"].items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(info['description'])} For programs: "
        '<a href="openapi.json"><code>/openapi.json</code></a>.</p>'
        f"<h2>Paths</h2>{paths}<h2>Bodies and answers</h2>{schemas}</body></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    return (
        f"<h3><code>{method.upper()} {escape(path)}</code></h3>"
        f"<p>{escape(operation['summary'])}</p>{operation_table(operation)}"
    )


def operation_table(operation: dict[str, Any]) -> str:
    """Returns a table of an operation's body, parameters and answers, in HTML."""
    rows = []
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        rows.append(("body", _type_of(body["schema"])))
    for parameter in operation.get("parameters", ()):
        name = f"<code>{escape(parameter['name'])}</code>"
        rows.append((f"{name} ({parameter['in']})", escape(parameter.get("description", ""))))
    for status, response in operation["responses"].items():
        if "$ref" in response:
            rows.append((status, "Error"))
        else:
            kinds = (
                _type_of(kind["schema"]) if "schema" in kind else escape(media_type)
                for media_type, kind in response["content"].items()
            )
            rows.append((status, " or ".join(kinds)))
    return _table(rows)


def _schema(name: str, schema: dict[str, Any]) -> str:
    return (
        f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>'
        f"<p>{escape(schema.get('description', ''))}</p>{schema_table(schema)}"
    )


def schema_table(schema: dict[str, Any]) -> str:
    """Returns a table of a schema's fields in HTML, or the type of the schema if the schema has no
    fields. Required fields have a star. A type that has a name is shown as a link to the part of
    the page that describes it."""
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(field)}</code>{' *' if field in required else ''}",
            f"{_type_of(kind)} {escape(kind.get('description', ''))}",
        )
        for field, kind in schema.get("properties", {}).items()
    ]
    return _table(rows) if rows else _type_of(schema)


def _table(rows: list[tuple[str, str]]) -> str:
    return f"<table>{''.join(f'<tr><td>{a}</td><td>{b}</td></tr>' for a, b in rows)}</table>"


def _type_of(schema: dict[str, Any]) -> str:
    """Returns a description of the allowed values of a schema, in HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(map(_type_of, schema[several]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    return "; ".join([_plain_type(schema), *_bounds(schema)])


def _plain_type(schema: dict[str, Any]) -> str:
    kind = escape(str(schema.get("type", "any")))
    if kind == "array" and "items" in schema:
        return f"array of {_type_of(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type_of(schema['additionalProperties'])}"
    return kind


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    for name, words in _BOUNDS.items():
        if name in schema:
            yield escape(words.format(schema[name]))
