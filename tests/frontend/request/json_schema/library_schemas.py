"""Schemas as Pydantic and Zod write them, each with a value and the keywords that no grammar
enforces."""

import enum
import ipaddress
import uuid
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from re import Pattern
from typing import Annotated, Any, Literal

from pydantic import (
    UUID4,
    AnyUrl,
    AwareDatetime,
    Base64Str,
    BaseModel,
    ByteSize,
    Field,
    FiniteFloat,
    HttpUrl,
    Json,
    PostgresDsn,
    RedisDsn,
    SecretStr,
    StringConstraints,
    TypeAdapter,
)

Case = tuple[dict[str, Any], Any, list[str]]


class Cat(BaseModel):
    """A pet that counts its lives."""

    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    """A pet with a name."""

    kind: Literal["dog"]
    name: Annotated[str, Field(max_length=20)]


class Node(BaseModel):
    """A list whose parts hold the rest of the list."""

    value: int
    rest: "Node | None" = None


class Colour(enum.Enum):
    """Values of two types."""

    RED = "red"
    SEVEN = 7


PYDANTIC: dict[str, tuple[Any, Any, list[str] | None]] = {
    "set": (set[int], [1, 2], ["uniqueItems"]),
    "frozenset": (frozenset[str], ["a"], ["uniqueItems"]),
    "Path": (Path, "/a/b", []),
    "SecretStr": (SecretStr, "secret", []),
    "bytes": (bytes, "abc", []),
    "Base64Str": (Base64Str, "YWI=", []),
    "UUID4": (UUID4, "b8c3fa9f-4b4e-4a0a-9d0f-0f8f6e0f7a11", []),
    "UUID": (uuid.UUID, "b8c3fa9f-4b4e-4a0a-9d0f-0f8f6e0f7a11", []),
    "IPv4Address": (ipaddress.IPv4Address, "10.0.0.1", []),
    "IPv6Network": (ipaddress.IPv6Network, "2001:db8::/32", []),
    "PostgresDsn": (PostgresDsn, "postgres://u:p@h/db", []),
    "RedisDsn": (RedisDsn, "redis://h:1/0", []),
    "HttpUrl": (HttpUrl, "https://example.com/a?b=c", []),
    "AnyUrl": (AnyUrl, "ftp://example.com/x", []),
    "datetime": (datetime, "2024-02-29T23:59:59.25+05:30", []),
    "aware datetime": (AwareDatetime, "2024-12-31T00:00:00Z", []),
    "date": (date, "2000-02-29", []),
    "time": (time, "10:11:12Z", []),
    "timedelta": (timedelta, "P1DT2H", []),
    "Decimal": (Decimal, 1.5, None),  # some versions have a pattern that looks ahead
    "Literal": (Literal["a", 1, None], None, []),
    "Optional": (int | None, None, []),
    "union": (int | str | list[int], [1], []),
    "recursive": (Node, {"value": 1, "rest": {"value": 2, "rest": None}}, []),
    "discriminated": (
        Annotated[Cat | Dog, Field(discriminator="kind")],
        {"kind": "dog", "name": "Rex"},
        [],
    ),
    "list of models": (list[Cat], [{"kind": "cat", "lives": 1}], []),
    "dict": (dict[str, int], {"a": 1}, []),
    "dict of literals": (dict[Literal["a", "b"], int], {"a": 1, "b": 2}, []),
    "dict of patterns": (
        dict[Annotated[str, StringConstraints(pattern="^x-")], int],
        {"x-a": 1},
        [],
    ),
    "tuple": (tuple[int, str], [1, "a"], []),
    "tuple of many": (tuple[int, ...], [1, 2, 3], []),
    "constr": (
        Annotated[str, StringConstraints(min_length=1, max_length=3, pattern="^a+$")],
        "aa",
        [],
    ),
    "conint": (Annotated[int, Field(gt=1, le=9, multiple_of=2)], 4, []),
    "conlist": (Annotated[list[int], Field(min_length=1, max_length=2)], [1], []),
    "enum": (Colour, 7, []),
    "Any": (Any, {"a": [None]}, []),
    "Json": (Json[list[int]], "[1]", []),
    "Pattern": (Pattern[str], "a+", []),
    "FiniteFloat": (FiniteFloat, -0.5, []),
    "ByteSize": (ByteSize, 5, []),
}

ZOD: dict[str, Case] = {
    "string": ({"type": "string"}, "a", []),
    "email": (
        {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
            r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        },
        "ann@example.com",
        ["pattern"],
    ),
    "startsWith": ({"type": "string", "pattern": "^ab.*"}, "abc", []),
    "endsWith": ({"type": "string", "pattern": ".*yz$"}, "xyz", []),
    "includes": ({"type": "string", "pattern": "b"}, "abc", []),
    "two checks": (
        {"type": "string", "allOf": [{"pattern": "^a.*"}, {"pattern": ".*z$"}]},
        "abz",
        [],
    ),
    "base64": (
        {
            "type": "string",
            "format": "base64",
            "contentEncoding": "base64",
            "pattern": r"^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|"
            r"(?:[0-9a-zA-Z+/]{3}=))?$",
        },
        "YWI=",
        [],
    ),
    "base64url": (
        {"type": "string", "format": "base64url", "pattern": "^[A-Za-z0-9_-]*$"},
        "YW-_",
        [],
    ),
    "jwt": ({"type": "string", "format": "jwt"}, "a.b.c", []),
    "e164": (
        {"type": "string", "format": "e164", "pattern": r"^\+[1-9]\d{6,14}$"},
        "+4912345678",
        [],
    ),
    "cidrv4": (
        {
            "type": "string",
            "format": "cidrv4",
            "pattern": r"^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\.){3}"
            r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\/([0-9]|[1-2][0-9]|3[0-2])$",
        },
        "10.0.0.0/8",
        [],
    ),
    "emoji": (
        {
            "type": "string",
            "format": "emoji",
            "pattern": r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$",
        },
        "\N{SPOUTING WHALE}",
        [],
    ),
    "uuid": (
        {
            "type": "string",
            "format": "uuid",
            "pattern": r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}"
            r"-[0-9a-fA-F]{12}|00000000-0000-0000-0000-000000000000)$",
        },
        "b8c3fa9f-4b4e-4a0a-9d0f-0f8f6e0f7a11",
        [],
    ),
    "nanoid": (
        {"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"},
        "abcdefghijklmnopqrstu",
        [],
    ),
    "iso.date": (
        {
            "type": "string",
            "format": "date",
            "pattern": r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|"
            r"[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|"
            r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))$",
        },
        "2024-02-29",
        [],
    ),
    "iso.duration": (
        {
            "type": "string",
            "format": "duration",
            "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?"
            r"(\d+([.,]\d+)?S)?)?)$",
        },
        "P1DT2H",
        ["pattern"],
    ),
    "int": (
        {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        -5,
        [],
    ),
    "positive": ({"type": "number", "exclusiveMinimum": 0}, 0.5, []),
    "literals": ({"type": "string", "enum": ["a", "b"]}, "b", []),
    "literal": ({"type": "number", "const": 7}, 7, []),
    "nullable": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None, []),
    "record": (
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"},
        },
        {"a": 1.5},
        [],
    ),
    "record of an enum": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "number"},
            "required": ["a", "b"],
        },
        {"a": 1, "b": 2},
        [],
    ),
    "never": (
        {
            "type": "object",
            "properties": {"a": {"not": {}}, "b": {"type": "string"}},
            "required": ["b"],
            "additionalProperties": False,
        },
        {"b": "x"},
        [],
    ),
    "catchall never": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "additionalProperties": {"not": {}},
        },
        {"a": "x"},
        [],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
        ["a", 1],
        [],
    ),
    "tuple of draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "string"}, {"type": "number"}],
        },
        ["a", 1],
        [],
    ),
    "intersection": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "number"}}, "required": ["b"]},
            ]
        },
        {"a": "x", "b": 1},
        [],
    ),
    "discriminated union": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"t": {"type": "string", "const": name}},
                    "required": ["t"],
                    "additionalProperties": False,
                }
                for name in "ab"
            ]
        },
        {"t": "b"},
        [],
    ),
    "lazy": (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#"}},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        },
        {"name": "a", "children": [{"name": "b", "children": []}]},
        [],
    ),
    "default and description": (
        {"type": "string", "default": "a", "description": "d", "examples": ["b"], "id": "x"},
        "c",
        [],
    ),
}


def cases() -> Iterator[tuple[str, dict[str, Any], Any, list[str] | None]]:
    """Yields the name of each case, its schema, a value, and the keywords that are not enforced, or
    None if that depends on the version of the library."""
    for name, (kind, value, keywords) in PYDANTIC.items():
        yield f"pydantic {name}", TypeAdapter(kind).json_schema(), value, keywords
    for name, case in ZOD.items():
        yield f"zod {name}", *case
