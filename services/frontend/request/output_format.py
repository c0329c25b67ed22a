"""Translates each format that a client may request for an output to a grammar. The formats are:

    JSON that matches a schema (`json_schema`), with white space as Python's `json.dumps` writes it
        and no other, so that no output fills up with white space; the schema may allow any object
    a text that matches a regular expression, in the syntax of Rust
    one of several texts
    a text that follows a grammar, written in llguidance's dialect of Lark or in GBNF

Only compiling a grammar shows whether a model can follow it (`services.grammar.grammars`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.common import errors
from services.frontend.request.json_object import read_json_object
from services.frontend.request.json_schema.client_schema import AdditionalProperties, ClientSchema

MAX_CHOICES = 1024
"""Largest number of texts among which a format lets the model choose."""

MAX_LENGTH = 2**16
"""Largest number of characters of a format: of a regular expression, of all texts of a choice, of a
grammar, or of the enforced part of a schema. The grammar of many tools may be longer."""

MAX_SCHEMA_LENGTH = 2**18
"""Largest number of characters of a schema that is given as text, including its annotations.
Parsing the text takes up to 0.04 s; a text of brackets alone takes longest."""

MAX_MESSAGE_LENGTH = 500
"""Largest number of characters of the explanation to the client why a grammar is refused."""

MAX_GBNF_LENGTH = 2**14
"""Largest number of characters of a grammar in GBNF. Translating a thousand characters takes up to
ten milliseconds."""

MAX_GBNF_RULES = 256
"""Largest number of rules of a grammar in GBNF. The number is limited because the translator looks
at all rules for each rule."""

_LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
"""Matches a line that occurs in grammars in Lark and never in grammars in GBNF."""

_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format that a request asks for."""

    field: str = "format"
    """Field of the request that asks for the format, as the client spells it."""
    grammar: str = ""
    """Grammar of the format; empty if the request asks for no format."""
    schema: ClientSchema | None = None
    """The JSON schema of the format, if it has one."""

    @classmethod
    def of_schema(cls, field: str, schema: ClientSchema) -> Self:
        """Returns the format of JSON that matches a schema. Raises the same errors as
        `json_schema`."""
        return cls(field, json_schema(schema), schema)

    def with_additional(self, additional_properties: AdditionalProperties) -> "OutputFormat":
        """Returns the same format, in which objects may also have the members that
        `additional_properties` allows."""
        schema = self.schema
        if schema is None or schema.additional_properties == additional_properties:
            return self
        schema = replace(schema, additional_properties=additional_properties)
        return self.of_schema(self.field, schema)


NO_FORMAT = OutputFormat()

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def json_object() -> str:
    """Returns the grammar of any JSON object."""
    return json_schema(ClientSchema(ANY_OBJECT, "json_object"))


def json_schema(schema: ClientSchema) -> str:
    """Returns the grammar of JSON that matches the enforceable part of a schema.

    Raises:
        InvalidRequest: the schema is wrong or too long, or is strict and cannot be enforced.
    """
    enforced = {**schema.enforced, "x-guidance": _SPACING}
    grammar = _json_text({"grammars": [{"json_schema": enforced}]})
    check_length(schema.field, len(grammar))
    return grammar


def json_rule(enforced: Mapping[str, Any]) -> str:
    """Returns an expression for JSON that matches a schema, for use in a rule of a Lark grammar.
    The schema must be enforceable (`ClientSchema.enforced`)."""
    return f"%json {_json_text({**enforced, 'x-guidance': _SPACING})}"


def read_schema(text: str, field: str) -> dict[str, Any]:
    """Parses a JSON schema that is given as text.

    Raises:
        InvalidRequest: the text is not a JSON object, or is too long.
    """
    check_length(field, len(text), MAX_SCHEMA_LENGTH)
    return read_json_object(field, text)


def regex(pattern: str, *, field: str = "regex") -> str:
    """Returns the grammar of texts that match a regular expression as a whole.

    Raises:
        InvalidRequest: the expression is too long.
    """
    check_length(field, len(pattern))
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str], *, field: str = "choice") -> str:
    """Returns the grammar of an output that is one of `texts`.

    Raises:
        InvalidRequest: there are no texts or too many, or one of them is empty.
    """
    if not 1 <= len(texts) <= MAX_CHOICES or not all(texts):
        raise errors.InvalidRequest(field, f"must be 1 to {MAX_CHOICES} texts, none of them empty")
    check_length(field, sum(map(len, texts)))
    return "start: " + " | ".join(map(quoted, texts))


def quoted(text: str) -> str:
    """Returns a text as a literal for a Lark grammar. Control characters are escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def grammar(text: str, *, field: str = "grammar") -> str:
    """Returns a grammar that the client has written, translated to Lark if it is GBNF.

    Raises:
        InvalidRequest: the grammar is empty or too long, or is GBNF that is wrong or too long to be
        translated.
    """
    if not text:
        raise errors.InvalidRequest(field, "must not be empty")
    check_length(field, len(text))
    if "::=" not in text or _LARK.search(text):
        return text
    if len(text) > MAX_GBNF_LENGTH:
        raise errors.InvalidRequest(
            field, f"of GBNF has {len(text)} characters, {MAX_GBNF_LENGTH} at most"
        )
    if text.count("::=") > MAX_GBNF_RULES:
        raise errors.InvalidRequest(field, f"of GBNF has more than {MAX_GBNF_RULES} rules")
    try:
        return gbnf_to_lark(text)
    except RecursionError:  # the translator calls itself for each bracket
        raise errors.InvalidRequest(field, "is nested too deeply") from None
    except Exception as error:  # the translator raises a bare Exception if a rule is missing
        raise errors.InvalidRequest(field, str(error)[:MAX_MESSAGE_LENGTH]) from error


def parts(grammar: str) -> list[dict[str, Any]]:
    """Splits a valid grammar into its parts, to use them in a larger grammar. The larger grammar
    refers to the first part by `@` and the part's name."""
    found: list[dict[str, Any]] = [{"lark_grammar": grammar}]
    if grammar.lstrip().startswith("{"):
        found = json.loads(grammar)["grammars"]
    found[0].setdefault("name", "format")
    return found


def check_length(field: str, n_characters: int, max_length: int = MAX_LENGTH) -> None:
    """Raises InvalidRequest if a text is longer than `max_length`. Call it before the text is
    parsed."""
    if n_characters > max_length:
        raise errors.InvalidRequest(field, f"has {n_characters} characters, {max_length} at most")


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
