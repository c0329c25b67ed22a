"""Parts of the grammars that make an output call tools, in llguidance's dialect of Lark.

The grammar of a family has a rule `answer`. The arguments of each tool have a separate rule, made
from the tool's schema. Marks that are special tokens of the checkpoint are written as numbers of
tokens, since texts in a grammar never match special tokens.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.frontend.request.output_format import quoted

TEXT = r"TEXT: /(.|\n)*/"
"""Rule of any text without special tokens."""


@dataclass(frozen=True, slots=True)
class ToolRule:
    """A tool, and the rule that its arguments follow."""

    name: str
    arguments: str
    """Name of the grammar's rule of the arguments as JSON."""
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    """Schema of the arguments, for formats in which they are not JSON."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The texts that mark calls, in the form in which a grammar refers to them."""

    special: Mapping[str, int]
    """Token of each mark that is a special token."""

    def __getitem__(self, marker: str) -> str:
        return f"<[{self.special[marker]}]>" if marker in self.special else quoted(marker)

    def is_special(self, marker: str) -> bool:
        """Returns whether a mark is a special token."""
        return marker in self.special

    def up_to(self, name: str, marker: str) -> str:
        """Returns the rule `name`: any text, up to and with the first mark."""
        if self.is_special(marker):
            return f"{name}: TEXT {self[marker]}"
        pattern = re.escape(marker).replace("/", r"\/")
        return rf"{name}[lazy]: /(.|\n)*{pattern}/"

    def after_text(self, marker: str, rule: str, *, is_single: bool) -> str:
        """Returns the rule `answer`: text in which `rule` follows each mark, or only the first if
        `is_single`."""
        answer = f"until {rule} | TEXT" if is_single else f"(until {rule})* TEXT"
        return f"answer: {answer}\n{self.up_to('until', marker)}\n"


def repeated(rule: str, separator: str, *, is_single: bool) -> str:
    """Returns a rule once if `is_single`, else any number of times, at least once, with a
    separator."""
    return rule if is_single else f"{rule} ({quoted(separator) if separator else ''} {rule})*"


def call_object(arguments: str) -> Callable[[ToolRule], str]:
    """Returns a function that makes the rule of a call as JSON, in which `arguments` is the name of
    the member with the arguments."""

    def rule(tool: ToolRule) -> str:
        lexemes = ["{", '"name"', ": ", json.dumps(tool.name, ensure_ascii=False), ", "]
        lexemes += [f'"{arguments}"', ": "]
        return f'{" ".join(map(quoted, lexemes))} {tool.arguments} "}}"'

    return rule


def one_of(tools: Sequence[ToolRule], to_rule: Callable[[ToolRule], str]) -> str:
    """Returns the rule `call`: a call of any of the tools."""
    rules = [f"call_{number}: {to_rule(tool)}" for number, tool in enumerate(tools)]
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    return "\n".join([f"call: {names}", *rules])
