"""The rules for translating the keywords of a schema, except for the keywords of objects.

The rule of a keyword adds to the translated part what the engine can enforce, or reports the
keyword as not enforced.
"""

from collections.abc import Callable, Mapping

from services.frontend.request.json_schema import formats, patterns
from services.frontend.request.json_schema.alternatives import Alternatives
from services.frontend.request.json_schema.schema_part import Json, SchemaPart

MAX_MULTIPLE = 1000
"""Largest `multipleOf` that is enforced. The decimal point is ignored: 0.25 counts as 25. The
engine takes seconds for multiples of a million."""

MAX_VALUES = 2**15
"""Largest number of values in `enum`."""

_INT64 = 2**63

UNENFORCED = {
    *("not", "contains", "if", "dependentSchemas", "dependentRequired", "dependencies"),
    *("unevaluatedItems", "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy"),
}
"""Keywords that are not enforced. A keyword whose value constrains nothing (`is_without_effect`) is
not reported."""

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")


def _type(part: SchemaPart, keyword: str, value: Json) -> None:
    kinds = [value] if isinstance(value, str) else value
    known = ("null", "boolean", "object", "array", "number", "integer", "string")
    if kinds == ["any"]:  # of draft 3
        return
    if not isinstance(kinds, list) or not kinds or any(kind not in known for kind in kinds):
        raise part.wrong(keyword, "the name of a type, or a list of such names")
    part.out[keyword] = value


def _values(part: SchemaPart, keyword: str, value: Json) -> None:
    if keyword == "enum" and not (isinstance(value, list) and value):
        raise part.wrong(keyword, "a list of values that is not empty")
    if keyword == "enum" and len(value) > MAX_VALUES:
        raise part.wrong(keyword, f"a list of at most {MAX_VALUES} values")
    if _has_huge_number(part, value):
        part.report(keyword)
    else:
        part.out[keyword] = value


def _number(part: SchemaPart, keyword: str, value: Json) -> None:
    bound = keyword.removeprefix("exclusive").lower()
    if isinstance(value, bool) and keyword != bound:  # of draft 4
        if value and bound in part.schema:
            part.out[keyword] = part.schema[bound]
            part.out.pop(bound, None)
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise part.wrong(keyword, "a number")
    if abs(value) >= _INT64:
        part.report(keyword)
    else:
        part.out[keyword] = value


def _count(part: SchemaPart, keyword: str, value: Json) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise part.wrong(keyword, "a whole number that is not negative")
    if value >= 2**31:
        if keyword.startswith("min"):
            part.report(keyword)
        return
    part.out[keyword] = int(value)


def _multiple(part: SchemaPart, keyword: str, value: Json) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise part.wrong(keyword, "a number above 0")
    digits = f"{value:.12f}".rstrip("0").partition(".")[2]
    if value * 10 ** len(digits) > MAX_MULTIPLE or float(f"{value:.12f}") != value:
        part.report(keyword)
    else:
        part.out[keyword] = value


def _pattern(part: SchemaPart, keyword: str, value: Json) -> None:
    if not isinstance(value, str):
        raise part.wrong(keyword, "a regular expression")
    part.translation.references.work.spend(len(value) // 2)
    translated = patterns.enforceable(value)
    if translated is None:
        part.report(keyword)
    else:
        part.out[keyword] = translated


def _format(part: SchemaPart, keyword: str, value: Json) -> None:
    if not isinstance(value, str):
        return
    if value in formats.NATIVE:
        part.out[keyword] = value
    elif value in formats.PATTERNS and "pattern" not in part.out:
        part.out["pattern"] = formats.PATTERNS[value]
    elif value in formats.PATTERNS:
        part.out["allOf"] = [{"pattern": formats.PATTERNS[value]}]


def _reference(part: SchemaPart, keyword: str, value: Json) -> None:
    found = part.translation.reference(part.place, closes=part.branches_close)
    if found is not True:
        part.out |= found


def _all(part: SchemaPart, keyword: str, value: Json) -> None:
    branches = _listed(part, keyword, value, closes=part.branches_close)
    part.out.setdefault("allOf", []).extend(branches)


def _any(part: SchemaPart, keyword: str, value: Json) -> None:
    _alternatives(part, _listed(part, keyword, value, closes=part.branches_close))


def _one(part: SchemaPart, keyword: str, value: Json) -> None:
    branches = _listed(part, keyword, value, closes=part.branches_close)
    parts = [part.place.member(keyword, place) for place in range(len(branches))]
    alternatives = Alternatives(part.translation.references, are_closed=part.branches_close)
    if not alternatives.are_disjoint(parts):
        part.report(keyword)
    _alternatives(part, branches)


def _alternatives(part: SchemaPart, branches: list[Json]) -> None:
    if "anyOf" in part.out:  # a schema may have both anyOf and oneOf
        part.out.setdefault("allOf", []).append({"anyOf": branches})
    else:
        part.out["anyOf"] = branches


def _listed(part: SchemaPart, keyword: str, value: Json, *, closes: bool) -> list[Json]:
    if not isinstance(value, list) or not value:
        raise part.wrong(keyword, "a list of schemas that is not empty")
    return [part.member(keyword, place, closes=closes) for place in range(len(value))]


def _unique(part: SchemaPart, keyword: str, value: Json) -> None:
    if value is True and part.schema.get("maxItems") not in (0, 1):
        part.report(keyword)


def _items(part: SchemaPart, keyword: str, value: Json) -> None:
    if not isinstance(value, list):
        part.out["items"] = part.member(keyword)
        return
    part.out["prefixItems"] = [part.member(keyword, place) for place in range(len(value))]
    if "additionalItems" in part.schema:
        part.out["items"] = part.member("additionalItems")


def _prefix(part: SchemaPart, keyword: str, value: Json) -> None:
    if not isinstance(value, list):
        raise part.wrong(keyword, "a list of schemas")
    part.out[keyword] = [part.member(keyword, place) for place in range(len(value))]


RULES: Mapping[str, Callable[[SchemaPart, str, Json], None]] = {
    "type": _type,
    "const": _values,
    "enum": _values,
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(_COUNTS, _count),
    "multipleOf": _multiple,
    "pattern": _pattern,
    "format": _format,
    "$ref": _reference,
    "allOf": _all,
    "anyOf": _any,
    "oneOf": _one,
    "uniqueItems": _unique,
    "prefixItems": _prefix,
    "items": _items,
}


def is_never(schema: dict[str, Json]) -> bool:
    """Returns whether a schema says directly, by the keyword `not`, that no value matches it."""
    return "not" in schema and schema["not"] in (True, {}) and schema["not"] != 1.0


def is_without_effect(keyword: str, schema: dict[str, Json]) -> bool:
    """Returns whether a keyword of a schema has a value that constrains nothing. `keyword` must be
    one of the keywords that are not enforced."""
    value = schema[keyword]
    match keyword:
        case "not":
            return value is False
        case "if":
            return "then" not in schema and "else" not in schema
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "unevaluatedItems":
            return value in (True, {})
    return value in ({}, [])


def _has_huge_number(part: SchemaPart, value: Json) -> bool:
    """Returns whether a value contains a number that is too large for the engine to read
    exactly."""
    unseen = [value]
    while unseen:
        match unseen.pop():
            case bool() | str() | None:
                pass
            case int() | float() as number:
                if abs(number) >= _INT64:
                    return True
            case list() as items:
                part.translation.references.work.spend(len(items) // 8)
                unseen += items
            case dict() as members:
                part.translation.references.work.spend(len(members) // 8)
                unseen += members.values()
    return False
