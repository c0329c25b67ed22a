"""Makes grammar rules, from the schema of a tool, for arguments that are written one by one, each
as a name and a text. Strings are written without quotes, up to the mark that ends a value. Other
values are written as JSON."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.frontend.request.output_format import json_rule
from services.frontend.text.formats.grammar import Markers, ToolRule
from services.frontend.text.formats.narrowing_keywords import (
    ALL,
    COMBINING,
    COUNTS_AND_PATTERNS,
)
from services.frontend.text.formats.parameters import MAX_VISITS, resolved, types_of
from services.frontend.text.formats.rule_set import RuleSet
from services.frontend.text.formats.text_rules import TextRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """The texts that a format writes around the name and the value of an argument."""

    before_name: str
    after_name: str
    """Text between the name and the value of an argument that is a string."""
    after_value_name: str
    """Text between the name and the value of an argument that is not a string."""
    name_end: str
    """Character that ends a name. No name contains it."""
    end: str
    """Text that ends a value. No value contains it."""
    after: str
    """Text that a format writes after the text that ends a value."""


class ParameterGrammar:
    """Makes grammar rules for the arguments of several tools."""

    def __init__(self, markers: Markers, spelling: Spelling) -> None:
        self.rules = RuleSet()
        """Grammar rules to which the expressions refer."""
        self._markers = markers
        self._spelling = spelling
        self._texts = TextRules(self.rules, markers, spelling.end)

    def of(self, tool: ToolRule) -> str:
        """Returns the grammar expression for the arguments of a tool, in the order of the schema.

        Raises:
            InvalidRequest: the tool is strict, and its schema has a keyword that the format cannot
            enforce.
        """
        properties = tool.schema.get("properties")
        tool.note_unenforced(tool.schema, "$ref", *COMBINING, *COUNTS_AND_PATTERNS)
        if not isinstance(properties, dict):
            if tool.schema.get("additionalProperties") is False:
                return ""
            tool.note_unenforced(tool.schema, "required", "additionalProperties")
            return f"{self._any_parameter(tool)}*"
        required = required_names(tool.schema)
        parts = []
        for name in dict.fromkeys((*properties, *required)):
            parameter = " | ".join(self._parameter(name, properties.get(name), tool))
            parts.append(f"({parameter}){'' if name in required else '?'}")
        return " ".join(parts)

    def _parameter(self, name: str, schema: object, tool: ToolRule) -> Iterator[str]:
        """Yields the grammar expressions for an argument, including its name."""
        spelling, written = self._spelling, self._markers.written
        values = dict[str, list[str]]()
        for is_text, value in self._values(schema, tool, iter(range(MAX_VISITS))):
            after = spelling.after_name if is_text else spelling.after_value_name
            values.setdefault(after, []).append(value)
        for after, some in values.items():
            begin = written(f"{spelling.before_name}{name}{after}")
            yield f"{begin} ({' | '.join(some)}) {written(spelling.after)}"

    def _values(
        self, schema: object, tool: ToolRule, visits: Iterator[int]
    ) -> Iterator[tuple[bool, str]]:
        """Yields pairs, one for each form that a value may have: whether the value is a string in
        this form, and the grammar expression for the value and the text that ends it."""
        types = types_of(schema, tool.schema)
        if not isinstance(schema, dict) or types is None or next(visits, None) is None:
            if isinstance(schema, dict):
                tool.note_unenforced(schema, *ALL)
            yield True, self._texts.of({}, tool)
            return
        if isinstance(schema.get("$ref"), str):
            tool.note_unenforced(schema, *ALL)
            yield from self._values(resolved(schema["$ref"], tool.schema), tool, visits)
            return
        choices = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(choices, list) and "type" not in schema:
            taken = "anyOf" if "anyOf" in schema else "oneOf"
            tool.note_unenforced(schema, *(key for key in ALL if key != taken))
            for one in choices:
                yield from self._values(one, tool, visits)
            return
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list):
            for value in listed:
                is_text = isinstance(value, str)
                text = value if is_text else json.dumps(value, ensure_ascii=False)
                yield is_text, self._markers.written(text + self._spelling.end)
            return
        if "string" in types:
            tool.note_unenforced(schema, *COMBINING)
            yield True, self._texts.of(schema, tool)
        if others := types - {"string"}:
            yield False, self._json({**schema, "type": sorted(others)}, tool.schema)

    def _json(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        """Returns the grammar expression for JSON that matches a schema, including the text that
        ends the value."""
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        name = self.rules.add("value", json_rule({**shared, **schema}))
        return f"{name} {self._markers.written(self._spelling.end)}"

    def _any_parameter(self, tool: ToolRule) -> str:
        """Returns the grammar expression for an argument with any name."""
        spelling, written = self._spelling, self._markers.written
        name = self.rules.add("NAME", f"/[^\\n{re.escape(spelling.name_end)}]+/")
        begin = f"{written(spelling.before_name)} {name} {written(spelling.after_name)}"
        return f"({begin} {self._texts.of({}, tool)} {written(spelling.after)})"


def required_names(schema: Mapping[str, Any]) -> list[str]:
    """Returns the names of the members that an object must have to match a schema."""
    listed = schema.get("required")
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
