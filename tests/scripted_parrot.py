"""Parrots (`tests.parrot`) whose chat template contains the answers, for clients that write their
own prompts.

Agents write long system prompts and list dozens of tools, so a test cannot place the answer in the
prompt. Instead, a script says which answer the model gives to which turn. The template looks up the
answer and writes it at the position from which the model repeats it. The template shows only the
beginnings of system messages and tools, so that prompts stay short.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.parrot import END, START, Parrot, padded, write_parrot

MAX_ANSWER = 2048
"""Largest number of tokens of an answer and of the text that the template writes after it. Each
byte is a token."""
N_POSITIONS = 16384
SHOWN, SHOWN_OF_TOOLS = 300, 100
"""Number of characters that the template shows of each system message, and of each tool."""

_TEMPLATE = """\
{%- set script = SCRIPT -%}
{%- set chat = namespace(turn="", said="", answer=none) -%}
{%- for tool in tools or [] -%}
{{- "<|im_start|>tool\\n" + (tool | tojson)[:SHOWN_OF_TOOLS] + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content or "" -%}
{%- set shown = content[:SHOWN] if message.role == "system" else content -%}
{{- "<|im_start|>" + message.role + "\\n" + shown -}}
{%- for call in message.tool_calls or [] -%}
{{- "<tool_call>" + call.function.name + (call.function.arguments | tojson) -}}
</tool_call>
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- if message.role == "assistant" -%}
{%- set chat.said = chat.said + chat.turn + content -%}
{%- set chat.turn = "" -%}
{%- elif message.role != "system" -%}
{%- set chat.turn = chat.turn + content -%}
{%- endif -%}
{%- endfor -%}
{%- set chat.said = chat.said + chat.turn -%}
{%- for line in script if line.to in chat.turn and line.recalling in chat.said -%}
{%- if chat.answer is none %}{% set chat.answer = line.says %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ chat.answer + "<|im_start|>assistant\\n" }}{% endif -%}
"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a script: an answer, and the conditions under which the model gives it."""

    says: str
    to: str = ""
    """Text that must occur in the messages since the last answer."""
    recalling: str = ""
    """Text that must occur anywhere in the conversation, except in system messages."""


def write_scripted_parrot(directory: Path, script: Iterable[Line]) -> Parrot:
    """Writes a parrot whose answer is that of the first line of the script whose conditions are
    met."""
    parrot = write_parrot(directory, distance=MAX_ANSWER, n_positions=N_POSITIONS)
    lines = [
        {"to": line.to, "recalling": line.recalling, "says": _placed(parrot, line.says)}
        for line in (*script, Line(says="The script has no answer to this."))
    ]
    template = _TEMPLATE
    for name, value in {
        "SCRIPT": json.dumps(lines),
        "SHOWN_OF_TOOLS": str(SHOWN_OF_TOOLS),
        "SHOWN": str(SHOWN),
    }.items():
        template = template.replace(name, value)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return parrot


def _placed(parrot: Parrot, says: str) -> str:
    """Returns an answer with filler after it, so that the answer begins `MAX_ANSWER` tokens before
    the end of the prompt."""
    opening = f"{START}assistant\n"
    return padded(parrot.tokenizer, says + END, distance=MAX_ANSWER, after=opening)


def call(name: str, **arguments: object) -> str:
    """Returns a call of a tool in the form in which the model writes calls."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"
