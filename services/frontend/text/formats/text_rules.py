"""Makes grammar rules for strings that are written without quotes, up to a mark."""

import re
from collections.abc import Mapping
from typing import Any

from services.frontend.text.formats.grammar import Markers, ToolRule, pattern_of
from services.frontend.text.formats.rule_set import RuleSet

MAX_COUNTED = 1000
"""Largest bound on the length of a string that is enforced. A grammar needs one state for each
character that it counts."""

_ANY = r"(.|\n)"


class TextRules:
    """Makes grammar rules for strings that are followed by a mark."""

    def __init__(self, rules: RuleSet, markers: Markers, end: str) -> None:
        """`rules` is the set to which this object adds the rules that its expressions use. `end` is
        the mark that follows each string. No string may contain the mark."""
        self._rules = rules
        head, self._end = markers.divided(end)
        self._head = pattern_of(head)

    def of(self, schema: Mapping[str, Any], tool: ToolRule) -> str:
        """Returns the grammar expression for the strings that match a schema, including the mark
        after them.

        Raises:
            InvalidRequest: the tool is strict, and the schema has a keyword that is not enforced.
        """
        bodies = list(_patterns(schema, tool))
        if not bodies and not self._end:
            return self._rules.add("text", f"/{_ANY}*{self._head}/", "[lazy]")
        whole = " & ".join(f"/{body}{self._head}/" for body in bodies or [f"{_ANY}*"])
        if not self._end:  # the mark ends the string where it occurs first
            whole += f" & ~/{_ANY}*{self._head}{_ANY}+/"
        return f"{self._rules.add('TEXT', whole)} {self._end}".rstrip()


def _patterns(schema: Mapping[str, Any], tool: ToolRule) -> list[str]:
    """Returns regular expressions. A string that matches all of them satisfies the keywords of a
    schema that can be enforced. The list is empty if the schema has no such keywords."""
    low, high = _bound(schema, "minLength", tool), _bound(schema, "maxLength", tool)
    tool.note_unenforced(schema, "format")
    patterns = []
    if low or high is not None:
        most = "" if high is None else str(high)
        patterns.append(f"{_ANY}{{{low or 0},{most}}}")
    if isinstance(schema.get("pattern"), str):
        patterns.append(_searched(schema["pattern"]))
    return patterns


def _bound(schema: Mapping[str, Any], keyword: str, tool: ToolRule) -> int | None:
    """Returns the bound on a string's length that `keyword` sets in a schema. Returns None if there
    is no bound, or if it cannot be enforced."""
    bound = schema.get(keyword)
    if not isinstance(bound, int):
        return None
    if bound <= MAX_COUNTED:
        return bound
    tool.note_unenforced(schema, keyword)
    return None


def _searched(pattern: str) -> str:
    """Returns a regular expression for the texts in which a pattern of JSON Schema occurs
    anywhere."""
    is_ended = pattern.endswith("$") and not pattern.endswith(r"\$")
    begin = "" if pattern.startswith("^") else f"{_ANY}*"
    body = pattern.removeprefix("^")
    body = re.sub(r"(?<!\\)/", r"\/", body.removesuffix("$") if is_ended else body)
    return f"{begin}({body}){'' if is_ended else f'{_ANY}*'}"
