"""Makes grammar rules from a JSON schema, for values that are written as Python literals or in
Gemma's notation.

Numbers, and strings of Python, are written as in JSON. For objects and lists, the grammar enforces
the members, the items and the number of items. Other keywords for objects and lists are reported as
not enforced.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from services.frontend.request.output_format import json_rule, quoted
from services.frontend.text.formats.grammar import Markers, ToolRule
from services.frontend.text.formats.literals import GEMMA_QUOTE
from services.frontend.text.formats.narrowing_keywords import (
    ALL,
    COMBINING,
    COUNTS_AND_PATTERNS,
    OF_NUMBERS,
    OF_STRINGS,
)
from services.frontend.text.formats.parameter_grammar import required_names
from services.frontend.text.formats.parameters import resolved, types_of
from services.frontend.text.formats.rule_set import RuleSet
from services.frontend.text.formats.text_rules import TextRules

NOTHING = '""'
"""Grammar expression for an empty text."""

MAX_COUNTED_ITEMS = 100
"""Largest bound on the length of a list that is enforced."""

MAX_NESTED = 64
"""Largest depth of nested schemas, references included. Values that are nested deeper may be
anything."""


class LiteralGrammar(ABC):
    """Makes grammar rules for the values of a tool's arguments in one notation."""

    words: ClassVar[Mapping[object, str]]
    """The words that the notation uses for true, false and null."""
    separator: ClassVar[str]
    """Text between two members or items."""

    def __init__(self, tool: ToolRule, prefix: str) -> None:
        """`prefix` is the beginning of the names of all rules."""
        self.rules = RuleSet(prefix)
        """Grammar rules to which the expressions refer."""
        self._tool = tool
        self._references: dict[str, str] = {}
        self._any = ""
        self._depth = 0

    def members(self, schema: Mapping[str, Any], to_key: Callable[[str], str]) -> str:
        """Returns the grammar expression for the members of an object, in the order of the schema.
        The result is empty if the object cannot have members. `to_key` returns the grammar
        expression for a key together with the text between key and value."""
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return ""
        required = required_names(schema)
        first = after = ""
        for name in reversed(dict.fromkeys((*properties, *required))):
            value = f"{to_key(name)} {self.value(properties.get(name))}"
            member = self.rules.add("member", value)
            one, another = f"{member} {after}", f"{quoted(self.separator)} {member}"
            if name in required:
                first = one
            else:
                first, another = f"({one} | {first or NOTHING})", f"({another})?"
            after = self.rules.add("after", f"{another} {after}")
            first = self.rules.add("members", first)
        return first

    def value(self, schema: object) -> str:
        """Returns the grammar expression for the values that match a schema."""
        if not isinstance(schema, dict) or self._depth == MAX_NESTED:
            return self._any_value()
        self._depth += 1
        try:
            return self._value(schema)
        finally:
            self._depth -= 1

    def literal(self, value: object) -> str:
        """Returns the grammar expression for one value."""
        if isinstance(value, str):
            return self._constant(value)
        if isinstance(value, dict):
            members = [f"{self._key(name)} {self.literal(one)}" for name, one in value.items()]
            return self._bracketed("{", members, "}")
        if isinstance(value, list):
            return self._bracketed("[", list(map(self.literal, value)), "]")
        word = self.words.get(value) if value is None or isinstance(value, bool) else None
        return quoted(json.dumps(value) if word is None else word)

    @abstractmethod
    def _string(self, schema: Mapping[str, Any]) -> str:
        """Returns the grammar expression for the strings that match a schema."""

    @abstractmethod
    def _constant(self, text: str) -> str:
        """Returns the grammar expression for one string."""

    @abstractmethod
    def _key(self, name: str) -> str:
        """Returns the grammar expression for the key of a member, together with the text between
        key and value."""

    @abstractmethod
    def _any_key(self) -> str:
        """Returns the grammar expression for any key, together with the text between key and
        value."""

    def _value(self, schema: Mapping[str, Any]) -> str:
        if isinstance(schema.get("$ref"), str):
            self._tool.note_unenforced(schema, *ALL)
            return self._referred(schema["$ref"])
        choices = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(choices, list) and choices and "type" not in schema:
            taken = "anyOf" if "anyOf" in schema else "oneOf"
            self._tool.note_unenforced(schema, *(key for key in ALL if key != taken))
            return f"({' | '.join(map(self.value, choices))})"
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(listed, list) and listed:
            return f"({' | '.join(map(self.literal, listed))})"
        types = types_of(schema, self._tool.schema)
        if types is None:
            self._tool.note_unenforced(schema, *ALL)
            return self._any_value()
        self._tool.note_unenforced(schema, *COMBINING)
        return f"({' | '.join(self._typed(schema, sorted(types)))})"

    def _typed(self, schema: Mapping[str, Any], types: list[str]) -> Iterator[str]:
        """Yields, for each of the types, a grammar expression for the values of that type that
        match a schema."""
        for one in types:
            match one:
                case "string":
                    yield self._string(schema)
                case "boolean":
                    yield f"{quoted(self.words[True])} | {quoted(self.words[False])}"
                case "null":
                    yield quoted(self.words[None])
                case "integer" | "number":
                    bounds = {key: schema[key] for key in OF_NUMBERS if key in schema}
                    yield self.rules.add("number", json_rule({"type": one, **bounds}))
                case "array":
                    yield self._list(schema)
                case "object":
                    yield self._object(schema)

    def _list(self, schema: Mapping[str, Any]) -> str:
        item = self.rules.add("item", self.value(schema.get("items")))
        low, high = schema.get("minItems"), schema.get("maxItems")
        self._tool.note_unenforced(schema, "prefixItems")
        for keyword in ("minItems", "maxItems"):
            bound = schema.get(keyword)
            if isinstance(bound, int) and bound > MAX_COUNTED_ITEMS:
                self._tool.note_unenforced(schema, keyword)
        low = min(low, MAX_COUNTED_ITEMS) if isinstance(low, int) else 0
        high = high if isinstance(high, int) and high <= MAX_COUNTED_ITEMS else None
        if high == 0:
            return '"[]"'
        most = "" if high is None else str(high - 1)
        items = f"{item} ({quoted(self.separator)} {item}){{{max(low - 1, 0)},{most}}}"
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        self._note_of_object(schema)
        if not isinstance(schema.get("properties"), dict):
            if schema.get("additionalProperties") is False:
                return '"{}"'
            value = self.value(schema.get("additionalProperties"))
            member = self.rules.add("member", f"{self._any_key()} {value}")
            return f'"{{" ({member} ({quoted(self.separator)} {member})*)? "}}"'
        return f'"{{" {self.members(schema, self._key)} "}}"'

    def _note_of_object(self, schema: Mapping[str, Any]) -> None:
        """Reports the keywords, in the schema of an object, that the grammar does not enforce."""
        self._tool.note_unenforced(schema, *COUNTS_AND_PATTERNS)
        if not isinstance(schema.get("properties"), dict):
            self._tool.note_unenforced(schema, "required")

    def _referred(self, reference: str) -> str:
        """Returns the name of the grammar rule for the schema to which a reference refers."""
        if reference not in self._references:
            name = self._references[reference] = self.rules.new_name("reference")
            self.rules.define(name, self.value(resolved(reference, self._tool.schema)))
        return self._references[reference]

    def _any_value(self) -> str:
        """Returns the name of the grammar rule for any value."""
        if not self._any:
            self._any = self.rules.new_name("any")
            types = ["array", "boolean", "null", "number", "object", "string"]
            self.rules.define(self._any, " | ".join(self._typed({}, types)))
        return self._any

    def _bracketed(self, begin: str, parts: list[str], end: str) -> str:
        inside = f" {quoted(self.separator)} ".join(parts)
        return f"{quoted(begin)} {inside} {quoted(end)}"


class PythonGrammar(LiteralGrammar):
    """Makes grammar rules for Python literals, and for the arguments of a call in Python."""

    words: ClassVar[Mapping[object, str]] = {True: "True", False: "False", None: "None"}
    separator = ", "

    def arguments(self) -> str:
        """Returns the grammar expression for the arguments of the tool, without the parentheses
        around them."""
        schema = self._tool.schema
        self._tool.note_unenforced(schema, "$ref", *COMBINING)
        self._note_of_object(schema)
        if isinstance(schema.get("properties"), dict):
            return self.members(schema, lambda name: quoted(f"{name}="))
        if schema.get("additionalProperties") is False:
            return ""
        argument = f'{self.rules.add("NAME", "/[a-z_][a-z0-9_]*/")} "=" {self._any_value()}'
        return f"({argument} ({quoted(self.separator)} {argument})*)?"

    def _string(self, schema: Mapping[str, Any]) -> str:
        kept = {key: schema[key] for key in OF_STRINGS if key in schema}
        return self.rules.add("string", json_rule({"type": "string", **kept}))

    def _constant(self, text: str) -> str:
        return quoted(json.dumps(text, ensure_ascii=False))

    def _key(self, name: str) -> str:
        return quoted(f"{json.dumps(name, ensure_ascii=False)}: ")

    def _any_key(self) -> str:
        return f'{self._string({})} ": "'


class GemmaGrammar(LiteralGrammar):
    """Makes grammar rules for values in Gemma's notation."""

    words: ClassVar[Mapping[object, str]] = {True: "true", False: "false", None: "null"}
    separator = ","

    def __init__(self, tool: ToolRule, prefix: str, markers: Markers) -> None:
        super().__init__(tool, prefix)
        self._markers = markers
        self._texts = TextRules(self.rules, markers, GEMMA_QUOTE)

    def _string(self, schema: Mapping[str, Any]) -> str:
        return f"{self._markers.written(GEMMA_QUOTE)} {self._texts.of(schema, self._tool)}"

    def _constant(self, text: str) -> str:
        return self._markers.written(f"{GEMMA_QUOTE}{text}{GEMMA_QUOTE}")

    def _key(self, name: str) -> str:
        return quoted(f"{name}:")

    def _any_key(self) -> str:
        return f'{self.rules.add("KEY", "/[A-Za-z_][A-Za-z0-9_]*/")} ":"'
