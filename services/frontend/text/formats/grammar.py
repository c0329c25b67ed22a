"""Makes parts of the grammars that force or allow an output to call tools, in llguidance's dialect
of Lark.

The grammar of a family has a rule `answer`. The arguments of each tool have a separate rule, made
from the tool's schema. Marks that are special tokens of the checkpoint are written as token ids,
because texts in a grammar never match special tokens.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common import errors
from services.frontend.request.json_schema.unenforced import Path, Unenforced, paths_of
from services.frontend.request.output_format import quoted

TEXT = r"TEXT: /(.|\n)*/"
"""Grammar rule for any text without special tokens."""


@dataclass(frozen=True, slots=True)
class ToolRule:
    """A tool, and the grammar rule that its arguments follow."""

    name: str
    arguments: str
    """Name of the grammar rule for the arguments as JSON."""
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    """Schema of the arguments, for formats that do not write arguments as JSON."""
    is_strict: bool = False
    """Whether it is an error if the grammar cannot enforce a keyword of the schema."""
    schema_field: str = ""
    """Field of the request that holds the schema."""
    unenforced: dict[Unenforced, None] = field(default_factory=dict)
    """Keywords of the schema that the format cannot enforce. They are added while the grammar is
    made."""
    _places: dict[int, Path] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Path of each part of the schema, keyed by the identity (`id`) of the part. Filled when a path
    is needed for the first time."""

    def note_unenforced(self, part: Mapping[str, Any], *keywords: str) -> None:
        """Reports each of `keywords` that occurs in `part`, a part of the tool's schema. Call it
        with keywords that the format of calls cannot enforce.

        Raises:
            InvalidRequest: the tool is strict, and the part has one of the keywords.
        """
        for keyword in keywords:
            if keyword not in part:
                continue
            if self.is_strict:
                raise errors.InvalidRequest(
                    self.schema_field,
                    f"{self._unenforced(part, keyword)} cannot be enforced in the model's format "
                    "of tool calls",
                )
            self.unenforced[self._unenforced(part, keyword)] = None

    def _unenforced(self, part: Mapping[str, Any], keyword: str) -> Unenforced:
        if not self._places:
            self._places.update(paths_of(self.schema))
        # A part that was made from others, and is not in the schema, counts as the root.
        return Unenforced(self._places.get(id(part), ()), keyword)


@dataclass(frozen=True, slots=True)
class Markers:
    """Converts texts, which may contain marks of calls, to grammar expressions. A mark that is a
    special token of the checkpoint is written as its token id."""

    special: Mapping[str, int]
    """Token id of each mark that is a special token."""

    def __getitem__(self, marker: str) -> str:
        return f"<[{self.special[marker]}]>" if marker in self.special else quoted(marker)

    def is_special(self, marker: str) -> bool:
        """Returns whether a mark is a special token."""
        return marker in self.special

    def written(self, text: str) -> str:
        """Returns the grammar expression for a text in which marks may occur. The result is empty
        if the text is empty."""
        return " ".join(self[part] for part in self._parts(text))

    def divided(self, text: str) -> tuple[str, str]:
        """Returns the part of a text before its first special token, and the grammar expression for
        the rest of the text. The expression is empty if the text has no special token."""
        parts = self._parts(text)
        if parts and not self.is_special(parts[0]):
            return parts[0], " ".join(self[part] for part in parts[1:])
        return "", " ".join(self[part] for part in parts)

    def up_to(self, name: str, marker: str) -> str:
        """Returns a grammar rule with the name `name`: any text up to the first occurrence of a
        mark, including the mark."""
        head, rest = self.divided(marker)
        if not rest:
            return rf"{name}[lazy]: /(.|\n)*{pattern_of(head)}/"
        if not head:
            return f"{name}: TEXT {rest}"
        return f"{name}: {name.upper()} {rest}\n{name.upper()}: /(.|\\n)*{pattern_of(head)}/"

    def _parts(self, text: str) -> list[str]:
        """Splits a text into its special tokens and the texts between them."""
        if not self.special:
            return [text] if text else []
        marks = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        return [part for part in re.split(f"({marks})", text) if part]

    def answer(
        self, marker: str, rule: str, *, is_free: bool, is_single: bool, between: str = ""
    ) -> str:
        """Returns the grammar rule `answer`. An answer is the mark `marker` and then `rule`: once
        if `is_single`, else one or more times with the text `between` in between. If `is_free`, an
        answer is any text in which a mark is followed by `rule`."""
        if is_free:
            return self._after_text(marker, rule, is_single=is_single)
        marked = repeated("marked_body", between, is_single=is_single)
        return f"answer: {marked}\nmarked_body: {self.written(marker)} {rule}\n"

    def _after_text(self, marker: str, rule: str, *, is_single: bool) -> str:
        """Returns the grammar rule `answer` for a text that may contain the mark `marker`. After
        each mark, `rule` follows. If `is_single`, there is at most one mark."""
        answer = f"until {rule} | TEXT" if is_single else f"(until {rule})* TEXT"
        return f"answer: {answer}\n{self.up_to('until', marker)}\n"


def pattern_of(text: str) -> str:
    """Returns a regular expression that matches only `text` itself, escaped for use between the
    slashes of a Lark grammar."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


def repeated(rule: str, separator: str, *, is_single: bool) -> str:
    """Returns a grammar expression: `rule` once if `is_single`, else one or more times with
    `separator` in between."""
    return rule if is_single else f"{rule} ({quoted(separator) if separator else ''} {rule})*"


def call_object(arguments: str) -> Callable[[ToolRule], str]:
    """Returns a function that makes the grammar rule of a call as a JSON object. `arguments` is the
    name of the member with the arguments."""

    def rule(tool: ToolRule) -> str:
        lexemes = ["{", '"name"', ": ", json.dumps(tool.name, ensure_ascii=False), ", "]
        lexemes += [f'"{arguments}"', ": "]
        return f'{" ".join(map(quoted, lexemes))} {tool.arguments} "}}"'

    return rule


def one_of(tools: Sequence[ToolRule], to_rule: Callable[[ToolRule], str]) -> str:
    """Returns the grammar rule `call`, which allows a call of any of the tools."""
    rules = [f"call_{number}: {to_rule(tool)}" for number, tool in enumerate(tools)]
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    return "\n".join([f"call: {names}", *rules])
