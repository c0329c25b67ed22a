"""The rules for translating the keywords of objects. These keywords depend on each other."""

from services.frontend.request.json_schema import patterns
from services.frontend.request.json_schema.members import declared
from services.frontend.request.json_schema.schema_part import Json, SchemaPart


def translate_object(part: SchemaPart) -> None:
    """Translates the keywords of objects in a part of a schema, and adds the result to the part's
    translated keywords."""
    schema, out = part.schema, part.out
    members = schema.get("properties", {})
    if not isinstance(members, dict):
        raise part.wrong("properties", "an object of schemas")
    required = schema.get("required", [])
    if not isinstance(required, list | bool):
        raise part.wrong("required", "a list of names")
    if isinstance(required, list) and required:
        if any(not isinstance(name, str) for name in required):
            raise part.wrong("required", "a list of names")
        out["required"] = list(dict.fromkeys(required))
    if members:
        out["properties"] = {name: part.member("properties", name) for name in members}
    is_open = _patterns(part)
    if "additionalProperties" in schema and not is_open:
        out["additionalProperties"] = part.member("additionalProperties")
    _names_of_members(part, is_open=is_open)
    _close(part, is_open=is_open)
    _counts_of_members(part)


def _patterns(part: SchemaPart) -> bool:
    """Translates `patternProperties`. Returns True if the patterns cannot be enforced. Then it is
    also unknown which members are additional: which members match none of the patterns."""
    found = part.schema.get("patternProperties")
    if found is None:
        return False
    if not isinstance(found, dict):
        raise part.wrong("patternProperties", "an object of schemas")
    part.translation.references.work.spend(sum(map(len, found)) // 2)
    translated = {
        patterns.enforceable(pattern): part.member("patternProperties", pattern)
        for pattern in found
    }
    starts = [patterns.literal_start(pattern) for pattern in found]
    if None in translated or not _are_apart(starts):
        part.report("patternProperties")
        if "additionalProperties" in part.schema:
            part.report("additionalProperties")
        return True
    if translated:
        part.out["patternProperties"] = translated
    return False


def _names_of_members(part: SchemaPart, *, is_open: bool) -> None:
    """Translates `propertyNames`. This is possible if the names are listed or must match one
    pattern, and if no other keyword constrains the names."""
    rules = _rules_of_names(part) if "propertyNames" in part.schema else {}
    if not rules:
        return
    others = ("properties", "patternProperties")
    is_free = not (part.is_combined or is_open or any(name in part.schema for name in others))
    value = part.out.get("additionalProperties", True)
    values = [rules["const"]] if "const" in rules else rules.get("enum")
    if is_free and len(rules) == 1 and isinstance(values, list):
        listed = [name for name in values if isinstance(name, str)]
        part.out["properties"] = dict.fromkeys(listed, value)
        part.out["additionalProperties"] = False
    elif is_free and rules.keys() == {"pattern"}:
        part.out["patternProperties"] = {rules["pattern"]: value}
        part.out["additionalProperties"] = False
    else:
        part.report("propertyNames")


def _rules_of_names(part: SchemaPart) -> dict[str, Json]:
    """Returns the translated keywords of `propertyNames`, after following a reference, without
    `type: string`, which every name satisfies. If some of the keywords cannot be enforced, returns
    `{"not": {}}`, so that the caller reports `propertyNames` as not enforced."""
    place = part.place.member("propertyNames")
    if place.value is False:
        return {"enum": []}
    place = part.translation.references.find(place) or place
    reported = part.translation.reported
    n_before = len(reported)
    translated = part.translation.schema(place, closes=True, depth=part.depth + 1)
    if len(reported) > n_before:  # `propertyNames` itself is reported instead
        for one in list(reported)[n_before:]:
            del reported[one]
        return {"not": {}}
    if not isinstance(translated, dict):
        return {} if translated else {"enum": []}
    return {
        keyword: value
        for keyword, value in translated.items()
        if (keyword, value) != ("type", "string")
    }


def _close(part: SchemaPart, *, is_open: bool) -> None:
    """Makes the translated part forbid members that are not declared. This is done if
    `unevaluatedProperties` forbids them, or if the client's schema says nothing about them and the
    translation closes such objects (`SchemaPart.closes`)."""
    schema, out = part.schema, part.out
    last = schema.get("unevaluatedProperties", True)
    is_demanded = last is False
    if not isinstance(last, bool) and last != {}:
        part.report("unevaluatedProperties")
        return
    if is_demanded and "additionalProperties" in schema:  # which leaves no member unevaluated
        return
    declares = "properties" in schema or part.has_several
    if not is_demanded and not (part.closes and declares):
        return
    found = declared(part.place, part.translation.references)
    is_exact = not (found.is_explicit or found.has_choices or is_open) and not any(
        name in schema for name in ("if", "dependentSchemas", "$dynamicRef", "$recursiveRef")
    )
    if is_demanded and not is_exact:
        part.report("unevaluatedProperties")
    says_nothing = "unevaluatedProperties" not in schema and found.has_properties
    if is_open or found.is_explicit or not (says_nothing or is_demanded):
        return
    members = out.setdefault("properties", {})
    for name in found.names:
        members.setdefault(name, True)
    out["additionalProperties"] = False


def _counts_of_members(part: SchemaPart) -> None:
    """Translates `minProperties` and `maxProperties`. The engine can count members only if all
    declared members are required."""
    schema, out = part.schema, part.out
    members, required = out.get("properties", {}), out.get("required", [])
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    for keyword in ("minProperties", "maxProperties"):
        if not isinstance(schema.get(keyword, 0), int | float):
            raise part.wrong(keyword, "a whole number")
    is_counted = not (part.is_combined or members.keys() - set(required))
    if low > len(required):
        # Members of the same name may be written several times, and then count once.
        if is_counted and low == len(required) + 1 and out.get("additionalProperties", True):
            out["minProperties"] = int(low)
        else:
            part.report("minProperties")
    is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
    if high is not None and not (is_closed and len(members) <= high):
        if is_counted:
            out["maxProperties"] = int(high)
        else:
            part.report("maxProperties")


def _are_apart(starts: list[str]) -> bool:
    """Returns whether none of the texts `starts` is a prefix of another one. More than 64 texts are
    not compared: the result is then False."""
    if len(starts) < 2:
        return True
    if len(starts) > 64 or not all(starts):
        return False
    return not any(
        one.startswith(other)
        for i, one in enumerate(starts)
        for j, other in enumerate(starts)
        if i != j
    )
