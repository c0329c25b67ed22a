"""Formats that a client may ask an output to have, as grammars.

    JSON of a schema, with the white space that Python's `json.dumps` writes and no other, so that
        no output fills up with it; any object is a schema, too
    a text that matches a regular expression, of Rust's syntax
    one of some texts
    a text of a grammar, in llguidance's dialect of Lark or in GBNF

Whether a grammar can be followed, only its compilation tells (`services.grammar.grammars`).
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
"""Texts of which an output may be one."""

MAX_MESSAGE_LENGTH = 500
"""Characters of an explanation that a client gets."""

MAX_GBNF_LENGTH = 2**14
"""Characters of a grammar in GBNF at most, of which a thousand take up to ten milliseconds."""

MAX_GBNF_RULES = 256
"""Rules of a grammar in GBNF at most: the translator looks at all of them once for each."""

_LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
"""What is in a grammar in Lark, and not in one in GBNF."""

_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_object() -> str:
    """Returns the grammar of any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any] | str, *, field: str = "json_schema") -> str:
    """Returns the grammar of JSON that keeps a schema, or the JSON text of one.

    Raises:
        InvalidRequest: the text of `field` is no JSON object, or the schema is too long.
    """
    if isinstance(schema, str):
        schema = _read(schema, field)
    else:
        _check_size(field, schema)
    try:
        return LLMatcher.grammar_from_json_schema(dict(schema), overrides=_SPACING)
    except ValueError as error:  # of a whole number of more than 64 bits
        raise errors.InvalidRequest(field, str(error)[:MAX_MESSAGE_LENGTH]) from None


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns JSON that keeps a schema, as a part of a grammar in Lark."""
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING}, ensure_ascii=False)}"


def regex(pattern: str, *, field: str = "regex") -> str:
    """Returns the grammar of texts that match a regular expression as a whole.

    Raises:
        InvalidRequest: it is too long.
    """
    check_length(field, len(pattern))
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str], *, field: str = "choice") -> str:
    """Returns the grammar of a few texts.

    Raises:
        InvalidRequest: there are none, too many, or an empty one.
    """
    if not 1 <= len(texts) <= MAX_CHOICES or not all(texts):
        raise errors.InvalidRequest(field, f"must be 1 to {MAX_CHOICES} texts, none of them empty")
    check_length(field, sum(map(len, texts)))
    return "start: " + " | ".join(map(quoted, texts))


def quoted(text: str) -> str:
    """Returns a text as a grammar in Lark has it, where no control character may stand."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def grammar(text: str, *, field: str = "grammar") -> str:
    """Returns a grammar that a client wrote itself.

    Raises:
        InvalidRequest: it is empty or too long, or GBNF that is wrong or too long to be translated.
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
    except Exception as error:  # which it raises as it is, where a rule is missing
        raise errors.InvalidRequest(field, str(error)[:MAX_MESSAGE_LENGTH]) from error


def parts(grammar: str) -> list[dict[str, Any]]:
    """Returns a grammar that can be followed as parts of a larger one, which refers to the first
    of them as `@` and its name."""
    found: list[dict[str, Any]] = [{"lark_grammar": grammar}]
    if grammar.lstrip().startswith("{"):
        found = json.loads(grammar)["grammars"]
    found[0].setdefault("name", "format")
    return found


def check_length(field: str, n_characters: int) -> None:
    """Raises InvalidRequest for what is longer than any grammar may be, before it is read."""
    if n_characters > MAX_GRAMMAR_LENGTH:
        raise errors.InvalidRequest(
            field, f"has {n_characters} characters, {MAX_GRAMMAR_LENGTH} at most"
        )


def _check_size(field: str, schema: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a schema that would be longer than any grammar may be. Each value
    counts as a character, which is the least that it takes, and each text as long as it is."""
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
