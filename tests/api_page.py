"""The reference of the API, `docs/api.md`, and the content that the code gives it.

On the page, a comment names the subject of a table, which follows the comment:

    <!-- fields CompletionBody -->      a body, its own fields: type, default, range
    <!-- answer Completion -->          an object of an answer
    <!-- message GenerationOptions -->  a message of the public protos
    <!-- enum FinishReason -->          an enumeration of the public protos
    <!-- routes -->, <!-- rpcs -->, <!-- errors -->

The tables of routes, bodies and answers of the HTTP API are made from the code alone, with the
docstrings of the fields as meanings. In the other tables, the last cell of each row, its meaning,
is written by hand on the page, and the other cells are made from the code. `python -m
tests.api_page` writes the tables into the page. Tables that the page lacks are added at its end.
"""

import dataclasses
import difflib
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from orcinus.v1 import inference_pb2, sampling_pb2
from pydantic import BaseModel
from typing_extensions import is_typeddict

from services.common import errors, rpc_handlers
from services.common.sampling import MAX_BAD_WORD_TOKENS, MAX_GRAMMAR_LENGTH, SamplingParams
from services.frontend import http
from services.frontend.http.bodies.field_docs import field_docs
from services.frontend.http.docs import openapi
from services.frontend.http.docs.schemas import schema_of_type
from services.frontend.http.openai.errors import error_body
from services.frontend.http.protocol.body import RequestBody
from services.frontend.http.protocol.errors import failure
from services.frontend.http.routes import served_routes
from services.frontend.request.generation_request import (
    GenerationOptions,
)

ALL_ROUTES = served_routes(has_page=True, has_metrics=True, has_receipts=True)

PAGE = Path(__file__).parents[1] / "docs" / "api.md"

MARKER = re.compile(r"^<!-- (\w+(?: [\w.]+)?) -->$", re.M)

UNSAID = "…"
"""Placeholder for the meaning of a row that has not been written yet."""

HEADS = {
    "fields": ("field", "type", "default", "range", "meaning"),
    "answer": ("field", "type", "meaning"),
    "message": ("field", "type", "meaning"),
    "enum": ("value", "meaning"),
    "routes": ("route", "answers", "meaning"),
    "rpcs": ("RPC", "request", "response", "meaning"),
    "errors": ("error", "HTTP", "type", "code", "gRPC", "when"),
}

OPTION_HEAD = ("field", "type", "default", "range", "meaning")
OPTION_MESSAGES = ("GenerationOptions", "SamplingParams")
"""Messages whose tables have columns for the default and the range of each field."""

WORD_RANGE = f"at most {MAX_BAD_WORD_TOKENS} tokens together"
"""Range of words that are given as tokens, which only gRPC accepts."""

ANY = "*"
"""Placeholder of a cell for which the code gives no value."""

Row = tuple[str, ...]
"""The cells of a row."""

Tables = dict[str, dict[str, Row]]
"""Tables by subject; each has its rows by their first cell."""


def head_of(subject: str) -> Row:
    """Returns the header cells of the table with a subject."""
    kind, _, name = subject.partition(" ")
    return OPTION_HEAD if name in OPTION_MESSAGES and kind == "message" else HEADS[kind]


@cache
def expected() -> Tables:
    """Returns all tables that follow from the code."""
    tables: Tables = {"routes": _routes(), "rpcs": _rpcs(), "errors": error_rows()}
    for name, kind in http_classes().items():
        if is_typeddict(kind):
            tables[f"answer {name}"] = _answer(kind)
        elif "not" not in kind.model_json_schema():  # else it stands for what is refused
            tables[f"fields {name}"] = _body(kind)
    for message in public_messages():
        tables[f"message {message.name}"] = _message(message)
        for enum in message.enum_types:
            tables[f"enum {message.name}.{enum.name}"] = _enum(enum)
    for enum in inference_pb2.DESCRIPTOR.enum_types_by_name.values():
        tables[f"enum {enum.name}"] = _enum(enum)
    return {subject: rows for subject, rows in tables.items() if rows}


def written(page: str) -> Tables:
    """Returns the tables on the page.

    Raises:
        ValueError: a subject or a row occurs twice.
    """
    tables: Tables = {}
    for match in MARKER.finditer(page):
        rows: dict[str, Row] = {}
        lines = page[match.end() :].lstrip("\n").splitlines()
        for line in lines[2:]:
            if not line.startswith("|"):
                break
            cells = tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            if cells[0] in rows:
                raise ValueError(f"{match[1]} has {cells[0]} twice")
            rows[cells[0]] = cells
        if match[1] in tables:
            raise ValueError(f"{match[1]} is there twice")
        tables[match[1]] = rows
    return tables


def faults(page: str) -> list[str]:
    """Returns lines of text about all faults of the page: tables of unknown subjects, rows without
    a meaning, and the lines in which the page differs from what the code would write."""
    tables = written(page)
    found = [
        f"there is no such subject: {subject}" for subject in tables.keys() - expected().keys()
    ]
    found += [
        f"{subject}: {name} has no meaning"
        for subject, rows in tables.items()
        for name, cells in rows.items()
        if cells[-1] in ("", UNSAID)
    ]
    after = rewritten(page).splitlines()
    return found + list(difflib.unified_diff(page.splitlines(), after, lineterm="", n=0))


# Bodies


@cache
def http_classes() -> Mapping[str, Any]:
    """Returns the types of bodies and answers of the HTTP API by their names.

    Raises:
        ValueError: two types have the same name.
    """
    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(http.__path__, f"{http.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            is_ours = getattr(value, "__module__", "") == module.name
            is_model = inspect.isclass(value) and issubclass(value, BaseModel)
            if is_ours and (is_model or hasattr(value, "__pydantic_config__")):
                if name in found:
                    raise ValueError(f"two types are called {name}")
                found[name] = value
    return found


def _body(model: type[BaseModel]) -> dict[str, Row]:
    own = inspect.get_annotations(model)
    rows: dict[str, Row] = {}
    for name, field in model.model_fields.items():
        if name not in own:
            continue
        shown = field.alias or name
        schema, definitions = _schema_of(model, shown)
        default = "required" if field.is_required() else _default(model, name, schema)
        rows[f"`{shown}`"] = (
            f"`{shown}`",
            _type(schema, definitions),
            default,
            _range(schema, definitions),
            _meaning(schema.get("description", UNSAID)),
        )
    return rows


def _meaning(text: str) -> str:
    """Returns a description in the form of a cell: without the final full stop, and with `|`
    escaped."""
    return text.removesuffix(".").replace("|", r"\|")


@cache
def _document() -> Mapping[str, Any]:
    schemas: Mapping[str, Any] = openapi.document(ALL_ROUTES, needs_key=True)["components"][
        "schemas"
    ]
    return schemas


def _schema_of(model: type[BaseModel], field: str) -> tuple[Any, Mapping[str, Any]]:
    """Returns the JSON schema of a field, and the definitions to which the schema refers. The
    schema is taken from the OpenAPI document if a body there has the field."""
    for kind in (model, *http_classes().values()):
        if not is_typeddict(kind) and issubclass(kind, model):
            properties = _document().get(kind.__name__, {}).get("properties", {})
            if field in properties:
                return properties[field], _document()
    schema = schema_of_type(model)
    return schema["properties"][field], schema.get("$defs", {})


def _default(model: type[BaseModel], name: str, schema: Any) -> str:
    default = model.model_fields[name].get_default(call_default_factory=True)
    if default is not None:
        return _value(default)
    neutral = [value for value in schema.get("enum", ()) if value is not None]
    if neutral:
        return _value(neutral[0]) if len(neutral) == 1 else ANY
    is_of_generation = model is RequestBody or "temperature" in model.model_fields
    return _option_default(name) if is_of_generation else ANY


def _option_default(name: str) -> str:
    """Returns the default of a request's option. Returns `ANY` if no single place in the code
    defines it."""
    fields = {**_dataclass_fields(GenerationOptions), **_dataclass_fields(SamplingParams)}
    field = fields.get(name)
    if field is None or field.default is None:
        return ANY
    if field.default is dataclasses.MISSING:
        return "random" if name == "seed" else ANY
    return _value(field.default)


def _dataclass_fields(kind: Any) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(kind)}


def _value(value: Any) -> str:
    if value in ("", (), [], {}):
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value)


# Types and ranges, from JSON schemas


def _branches(schema: Any, definitions: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the alternatives of a schema, without null."""
    reference = schema.get("$ref")
    if reference is not None:
        target = definitions[reference.rpartition("/")[2]]
        if target.get("type") != "object" and "properties" not in target:
            schema = {**target, **{key: schema[key] for key in schema.keys() - {"$ref"}}}
    several = schema.get("anyOf") or schema.get("oneOf")
    if several is None:
        if schema.get("type") != "null":
            yield schema
        return
    for branch in several:
        yield from _branches(branch, definitions)


def _type(schema: Any, definitions: Mapping[str, Any]) -> str:
    names = [_plain_type(branch, definitions) for branch in _branches(schema, definitions)]
    return " or ".join(dict.fromkeys(names)) or "null"


def _plain_type(schema: Any, definitions: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    values = [value for value in schema.get("enum", [schema.get("const")]) if value is not None]
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), definitions)}"
    if kind is None and values:
        names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list"}
        return names[type(values[0])]
    return kind or ("null" if "enum" in schema else "any")


def _range(schema: Any, definitions: Mapping[str, Any]) -> str:
    if "enum" in schema:
        values = [json.dumps(value) for value in schema["enum"] if value is not None]
        is_only = None in schema["enum"]
        if not values:
            return "refused"
        return ("only " if is_only else "") + ", ".join(f"`{value}`" for value in values)
    found = dict.fromkeys(
        text
        for branch in _branches(schema, definitions)
        for text in _plain_ranges(branch, definitions)
    )
    return "; ".join(found) or "any"


def _plain_ranges(schema: Any, definitions: Mapping[str, Any]) -> Iterator[str]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        yield ", ".join(f"`{json.dumps(value)}`" for value in values)
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None or high is not None:
        yield _interval(low, high)
    for least, most, unit in (
        ("minItems", "maxItems", "items"),
        ("minLength", "maxLength", "characters"),
        ("minProperties", "maxProperties", "entries"),
    ):
        if most in schema:
            yield f"{_interval(schema.get(least), schema[most])} {unit}"
        elif least in schema:
            yield "not empty" if schema[least] == 1 else f"at least {schema[least]} {unit}"
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict) and "$ref" not in inner:
            text = _range(inner, definitions)
            yield from [f"each {text}"] if text != "any" else []


def _interval(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {_number(low)}"
    if low is None:
        return f"at most {_number(high)}"
    return f"{_number(low)} to {_number(high)}"


def _number(value: Any) -> str:
    for power in (31, 63):
        if value == 2**power - 1:
            return f"2^{power} - 1"
        if value == -(2**power):
            return f"-2^{power}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _answer(kind: Any) -> dict[str, Row]:
    schema = schema_of_type(kind)
    definitions = schema.get("$defs", {})
    return {
        f"`{name}`": (
            f"`{name}`",
            _type(field, definitions),
            _meaning(field.get("description", UNSAID)),
        )
        for name, field in schema["properties"].items()
    }


# Messages


def public_messages() -> Iterator[Descriptor]:
    """Yields the messages of the public protos, outer messages before the messages inside them."""
    for file in (sampling_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR):
        for message in file.message_types_by_name.values():
            yield message
            yield from (
                nested for nested in message.nested_types if not nested.GetOptions().map_entry
            )


def _message(message: Descriptor) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    docs = field_docs(SamplingParams) if message.name == "SamplingParams" else {}
    for field in message.fields:
        row: Row = (f"`{field.name}`", _field_type(field))
        if message.name in OPTION_MESSAGES:
            is_sequences = field.message_type is not None and field.name == "bad_words"
            range_ = WORD_RANGE if is_sequences else _option_range(field.name)
            row += _option_default(field.name), range_
        rows[row[0]] = (*row, _meaning(docs[field.name]) if docs else ANY)
    return rows


def _enum(enum: EnumDescriptor) -> dict[str, Row]:
    return {f"`{value.name}`": (f"`{value.name}`", ANY) for value in enum.values}


def _option_range(name: str) -> str:
    """Returns the range of an option. The field of the same name over HTTP has the same range."""
    if name == "grammar":  # which HTTP spells in other ways
        return f"at most {MAX_GRAMMAR_LENGTH} characters"
    texts = _document()["StopTexts"]
    schema = texts if name == "stop" else _document()["CompletionBody"]["properties"].get(name, {})
    return _range(schema, _document())


def _field_type(field: Any) -> str:
    kinds = {
        getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
        for name in dir(FieldDescriptor)
        if name.startswith("TYPE_")
    }
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_field_type(each) for each in field.message_type.fields)
        return f"map of {key} to {value}"
    named = field.message_type or field.enum_type
    kind = f"`{named.name}`" if named is not None else kinds[field.type]
    return f"list of {kind}" if field.is_repeated else kind


# Routes, RPCs, errors


def _routes() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for path, operations in openapi.document(ALL_ROUTES, needs_key=True)["paths"].items():
        for method, operation in operations.items():
            name = f"`{method.upper()} {path}`"
            statuses = ", ".join(sorted(operation["responses"]))
            rows[name] = (name, statuses, _meaning(operation["summary"]))
    return rows


def _rpcs() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods:
        response = f"`{method.output_type.name}`"
        if method.server_streaming:
            response = f"stream of {response}"
        rows[f"`{method.name}`"] = (
            f"`{method.name}`",
            f"`{method.input_type.name}`",
            response,
            ANY,
        )
    return rows


def error_classes() -> list[type[errors.OrcinusError]]:
    """Returns the classes of the error tree, but for its root."""
    found = (kind for kind in vars(errors).values() if inspect.isclass(kind))
    return [
        kind
        for kind in found
        if issubclass(kind, errors.OrcinusError) and kind is not errors.OrcinusError
    ]


@cache
def error_rows() -> dict[str, Row]:
    """Returns the table of errors as the code has it."""
    rows: dict[str, Row] = {}
    for kind in error_classes():
        error = _example(kind)
        failed = failure(error)
        body = error_body(failed)["error"]
        row = (
            f"`{kind.__name__}`",
            str(failed.status),
            f"`{body['type']}`",
            f"`{body['code']}`" if body["code"] else "none",
            f"`{rpc_handlers.status_of(error, None).name}`",
            ANY,
        )
        rows[row[0]] = row
    return rows


def _example(kind: Any) -> errors.OrcinusError:
    """Returns an error of a class, made of any arguments that it wants."""
    arguments: dict[str, Any] = {
        name: 1.0 if name.endswith("_s") else "x" for name in inspect.signature(kind).parameters
    }
    error = kind(**arguments)
    assert isinstance(error, errors.OrcinusError)
    return error


# Writing


def rewritten(page: str) -> str:
    """Returns the page with exactly the rows that follow from the code. Cells for which the code
    gives no value are kept."""
    code, text = expected(), written(page)
    for subject, rows in code.items():
        table = _table(subject, rows, text.get(subject, {}))
        marker = f"<!-- {subject} -->\n"
        if subject not in text:
            page = page.rstrip("\n") + f"\n\n### {subject}\n\n{marker}{table}"
            continue
        before, _, after = page.partition(marker)
        lines = after.splitlines(keepends=True)
        n_rows = next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))
        page = before + marker + table + "".join(lines[n_rows:])
    return page


def _table(subject: str, rows: Mapping[str, Row], known: Mapping[str, Row]) -> str:
    head = head_of(subject)
    lines = [head, ("---",) * len(head)]
    unsaid = (*("none",) * (len(head) - 1), UNSAID)
    for name, row in rows.items():
        kept = known.get(name, unsaid)
        kept = kept if len(kept) == len(row) else unsaid
        lines.append(tuple(old if new == ANY else new for new, old in zip(row, kept, strict=True)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write("".join(f"{line}\n" for line in faults(PAGE.read_text("utf-8"))))
