"""The formats that a client may request for an output, each translated to a grammar.

    JSON that keeps a schema, with white space as Python's `json.dumps` writes it and no other, so
        that no output fills up with white space; the schema may allow any object
    a text that matches a regular expression, in the syntax of Rust
    one of several texts
    a text of a grammar, in llguidance's dialect of Lark or in GBNF

Only compiling a grammar shows whether a model can follow it (`services.grammar.grammars`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic_core
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.common import errors
from services.common.sampling import MAX_GRAMMAR_LENGTH

MAX_CHOICES = 1024
"""Largest number of texts in a choice."""

MAX_MESSAGE_LENGTH = 500
"""Largest number of characters of an explanation for clients."""

MAX_GBNF_LENGTH = 2**14
"""Largest number of characters of a grammar in GBNF. To translate a thousand characters takes up to
ten milliseconds."""

MAX_GBNF_RULES = 256
"""Largest number of rules of a grammar in GBNF: the translator looks at all rules once for each
rule."""

_LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
"""Pattern of a line that occurs in grammars in Lark and never in grammars in GBNF."""

_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_object() -> str:
    """Returns the grammar of any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any] | str, *, field: str = "json_schema") -> str:
    """Returns the grammar of JSON that matches a schema. The schema is given as an object or as
    JSON text.

    Raises:
        InvalidRequest: the text in `field` is not a JSON object, or the schema is too long.
    """
    if isinstance(schema, str):
        schema = _read(schema, field)
    else:
        _check_size(field, schema)
    try:
        return LLMatcher.grammar_from_json_schema(dict(schema), overrides=_SPACING)
    except ValueError as error:  # the schema has a whole number of more than 64 bits
        raise errors.InvalidRequest(field, str(error)[:MAX_MESSAGE_LENGTH]) from None


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns the expression for JSON that matches a schema, for use in a rule of a Lark
    grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING}, ensure_ascii=False)}"


def regex(pattern: str, *, field: str = "regex") -> str:
    """Returns the grammar of texts that match a regular expression as a whole.

    Raises:
        InvalidRequest: the expression is too long.
    """
    check_length(field, len(pattern))
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str], *, field: str = "choice") -> str:
    """Returns the grammar whose only texts are `texts`.

    Raises:
        InvalidRequest: there are no texts, too many, or an empty one.
    """
    if not 1 <= len(texts) <= MAX_CHOICES or not all(texts):
        raise errors.InvalidRequest(field, f"must be 1 to {MAX_CHOICES} texts, none of them empty")
    check_length(field, sum(map(len, texts)))
    return "start: " + " | ".join(map(quoted, texts))


def quoted(text: str) -> str:
    """Returns a text as a literal of a grammar in Lark, in which control characters are not
    allowed."""
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
    """Returns the parts of a valid grammar, to be put into a larger grammar. The larger grammar
    refers to the first part as `@` and its name."""
    found: list[dict[str, Any]] = [{"lark_grammar": grammar}]
    if grammar.lstrip().startswith("{"):
        found = json.loads(grammar)["grammars"]
    found[0].setdefault("name", "format")
    return found


def check_length(field: str, n_characters: int) -> None:
    """Raises InvalidRequest if a text is longer than any grammar may be; to be called before the
    text is parsed."""
    if n_characters > MAX_GRAMMAR_LENGTH:
        raise errors.InvalidRequest(
            field, f"has {n_characters} characters, {MAX_GRAMMAR_LENGTH} at most"
        )


def _check_size(field: str, schema: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if a schema is longer than any grammar may be. Each value counts as one
    character, the smallest size that it can have, and each text as its length."""
    n_left = MAX_GRAMMAR_LENGTH
    unseen: list[Any] = [schema]
    while unseen and n_left >= 0:
        match unseen.pop():
            case str() as text:
                n_left -= len(text)
            case dict() as members if len(members) <= n_left:
                unseen += members
                unseen += members.values()
            case list() as items if len(items) <= n_left:
                unseen += items
            case dict() | list():
                n_left = -1
            case _:
                pass
        n_left -= 1
    if n_left < 0:
        raise errors.InvalidRequest(field, f"has more than {MAX_GRAMMAR_LENGTH} characters")


def _read(schema: str, field: str) -> dict[str, Any]:
    check_length(field, len(schema))
    try:
        value = pydantic_core.from_json(schema)
    except ValueError as error:
        raise errors.InvalidRequest(field, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise errors.InvalidRequest(field, "must be a JSON object")
    return value
