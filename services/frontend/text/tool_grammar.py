"""Parts of the grammars that make an output call tools, in llguidance's dialect of Lark.

A family's grammar has a rule `answer`; each tool's arguments are a rule of their own, made of its
schema. Marks that are special tokens of the checkpoint are named by their number: a grammar's texts
never stand for these.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.frontend.request.output_format import quoted

TEXT = r"TEXT: /(.|\n)*/"
"""Any text, of no special tokens."""


@dataclass(frozen=True, slots=True)
class ToolRule:
    """A tool, and the name of the rule that its arguments follow."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Markers:
    """The texts that mark calls, as a grammar names them."""

    special: Mapping[str, int]
    """Numbers of those that are special tokens."""

    def __getitem__(self, marker: str) -> str:
        return f"<[{self.special[marker]}]>" if marker in self.special else quoted(marker)

    def is_special(self, marker: str) -> bool:
        """Returns whether it is a special token."""
        return marker in self.special

    def up_to(self, name: str, marker: str) -> str:
        """Returns the rule of that name: any text, up to the first time that the marker comes."""
        if self.is_special(marker):
            return f"{name}: TEXT {self[marker]}"
        pattern = re.escape(marker).replace("/", r"\/")
        return rf"{name}[lazy]: /(.|\n)*{pattern}/"

    def after_text(self, marker: str, rule: str, *, is_single: bool) -> str:
        """Returns the rule `answer` of text in which `rule` follows the marker."""
        answer = f"until {rule} | TEXT" if is_single else f"(until {rule})* TEXT"
        return f"answer: {answer}\n{self.up_to('until', marker)}\n"


def repeated(rule: str, separator: str, *, is_single: bool) -> str:
    """Returns a rule once, or as often as wanted."""
    return rule if is_single else f"{rule} ({quoted(separator) if separator else ''} {rule})*"


def call_object(arguments: str) -> Callable[[ToolRule], str]:
    """Returns what makes rules of calls that are JSON, with that name for their arguments."""

    def rule(tool: ToolRule) -> str:
        lexemes = ["{", '"name"', ": ", json.dumps(tool.name, ensure_ascii=False), ", "]
        lexemes += [f'"{arguments}"', ": "]
        return f'{" ".join(map(quoted, lexemes))} {tool.arguments} "}}"'

    return rule


def one_of(tools: Sequence[ToolRule], to_rule: Callable[[ToolRule], str]) -> str:
    """Returns the rule `call` of a call of any of the tools."""
    rules = [f"call_{number}: {to_rule(tool)}" for number, tool in enumerate(tools)]
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    return "\n".join([f"call: {names}", *rules])
