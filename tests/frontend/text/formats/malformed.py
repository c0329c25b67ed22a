"""Malformed calls of each format, and what must be true of their readers.

    python -m tests.frontend.text.formats.malformed [-n 20000] [--seed 0] [FORMAT …]

sends so many texts through the reader of each format. A text consists of proper messages, damaged
at random. Read in random pieces, it must give the same message as read at once, no reader may raise
an error, and no word may be lost.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence

from services.frontend.text.formats.call_reader import CallRules
from services.frontend.text.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from services.frontend.text.message_reader import MessageReader, PlainReader
from tests.frontend.text.formats.said import Said, read

TOOLS = {"find": '{"type": "object", "properties": {"a": {"type": "string"}}}', "dive": ""}

ARGUMENTS = '{"a": "WORD", "b": [1, {"c": null}]}'
ONE = f'{{"name": "find", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{"name": "find", "parameters": {ARGUMENTS}}}'


def _invoked(mark: str, block: str, *kinds: str) -> str:
    """Returns a call as tagged elements whose names contain a mark. `kinds` are attributes that
    give the type of an argument."""
    text, value = kinds or ("", "")
    return (
        f'<{mark}{block}>\n<{mark}invoke name="find">\n'
        f'<{mark}parameter name="a"{text}>WORD</{mark}parameter>\n'
        f'<{mark}parameter name="b"{value}>[1, "WORD"]</{mark}parameter>\n'
        f'</{mark}invoke>\n<{mark}invoke name="dive">\n</{mark}invoke>\n</{mark}{block}>'
    )


_ELEMENTS = (
    "<function=find>\n<parameter=a>\nWORD\n</parameter>\n"
    '<parameter=b>\n[1, "WORD"]\n</parameter>\n</function>'
)
_DSML = "｜DSML｜"
_DSML_KINDS = (' string="true"', ' string="false"')
_COHERE = f'{{"tool_call_id": "0", "tool_name": "find", "parameters": {ARGUMENTS}}}'
_ACTION = f'{{\n        "tool_name": "find",\n        "parameters": {ARGUMENTS}\n    }}'
_DEEPSEEK, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALLED, _CALLED_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_KIMI = (
    f"<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
)
_GLM = (
    "<tool_call>find",
    "<arg_key>a</arg_key>",
    "<arg_value>WORD</arg_value>",
    "<arg_key>b</arg_key>",
    '<arg_value>[1, "WORD"]</arg_value>',
    "</tool_call>",
)
_PYTHON = "[find(a='WORD', b=[1, {'c': None}]), dive()]"
_GEMMA = '<|tool_call>call:find{a:<|"|>WORD<|"|>,b:[1,{c:null,d:"WORD"}]}<tool_call|>'

SAMPLES: Mapping[str, Sequence[str]] = {
    "harmony": (
        "<|channel|>analysis<|message|>WORD<|end|>",
        f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        f" to=functions.find<|channel|>commentary json<|message|>{ARGUMENTS}<|end|>",
        "<|start|>assistant<|channel|>final<|message|>WORD<|return|>",
    ),
    "mistral": (
        f"[TOOL_CALLS][{ONE}, {ONE}]",
        f"[TOOL_CALLS]find[ARGS]{ARGUMENTS}",
        f"[TOOL_CALLS]find[CALL_ID]123456789[ARGS]{ARGUMENTS}",
    ),
    "kimi_k2": (f"<|tool_calls_section_begin|>{_KIMI}{_KIMI}<|tool_calls_section_end|>", _KIMI),
    "deepseek_v32": (_invoked(_DSML, "function_calls", *_DSML_KINDS),),
    "deepseek_v4": (_invoked(_DSML, "tool_calls", *_DSML_KINDS),),
    "deepseek_v3": (
        f"{_DEEPSEEK}{_CALLED}function<｜tool▁sep｜>find\n```json\n{ARGUMENTS}\n```{_CALLED_END}"
        f"{_DEEPSEEK_END}",
    ),
    "deepseek_v31": (
        f"{_DEEPSEEK}{_CALLED}find<｜tool▁sep｜>{ARGUMENTS}{_CALLED_END}{_DEEPSEEK_END}",
    ),
    "gemma4": (_GEMMA, "<|channel>thought\nWORD<channel|>"),
    "command_r7b": (
        f"<|START_ACTION|>[\n    {_COHERE},\n    {_COHERE}\n]<|END_ACTION|>",
        "<|START_RESPONSE|>WORD<|END_RESPONSE|>",
    ),
    "command_r": (f"Action:\n```json\n[\n    {_ACTION},\n    {_ACTION}\n]```",),
    "gigachat3": (f"<|message_sep|>\n\nfunction call<|role_sep|>\n{ONE}<|message_sep|>",),
    "granite": (
        f"<|tool_call|>[{ONE}, {ONE}]",
        "<think>WORD</think>",
        "<response>WORD</response>",
    ),
    "phi4_mini": (f"<|tool_call|>[{ONE}, {ONE}]<|/tool_call|>", f"functools[{ONE}]"),
    "nemotron": (f"<TOOLCALL>[{ONE}, {ONE}]</TOOLCALL>",),
    "apriel": (f"<tool_calls>[{ONE}, {ONE}]</tool_calls>",),
    "minimax_m1": (f"<tool_calls>\n{ONE}\n{ONE}\n</tool_calls>",),
    "minimax_m2": (_invoked("", "minimax:tool_call"),),
    "lfm2": (f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>", f"<|tool_call_start|>[{ONE}]"),
    "qwen3_coder": (
        f"<tool_call>\n{_ELEMENTS}\n</tool_call>",
        _ELEMENTS,
        f"<tool_call>\n{ONE}\n</tool_call>",
    ),
    "glm47": ("".join(_GLM),),
    "glm45": ("\n".join(_GLM),),
    "functionary_v31": (f"<function=find>{ARGUMENTS}</function><function=dive>{{}}</function>",),
    "functionary_v32": (f">>>find\n{ARGUMENTS}", ">>>all\nWORD"),
    "firefunction": (f"functools[{ONE}, {ONE}]",),
    "hermes": (
        f"<tool_call>\n{ONE}\n</tool_call>",
        f"<tool_call>[{ONE}, {ONE}]</tool_call>",
        "<tool_call>{'name': 'find', 'arguments': {'a': 'WORD'}}</tool_call>",
        f"<tool_call>\n```json\n{ONE}\n```\n</tool_call>",
        f"<tool_call>\n{{{ONE}}}\n</tool_call>",
    ),
    "pythonic": (_PYTHON, f"<|python_start|>{_PYTHON}<|python_end|>"),
    "llama3": (f"<|python_tag|>{LLAMA}", f"{LLAMA}; {LLAMA}"),
    "command": (
        "<|START_THINKING|>WORD<|END_THINKING|>",
        "<|START_RESPONSE|>WORD<|END_RESPONSE|>",
    ),
    "magistral": ("[THINK]WORD[/THINK]",),
    "kimi": ("◁think▷WORD◁/think▷",),
    "seed": ("<seed:think>WORD</seed:think>",),
    "think": ("<think>\nWORD\n</think>\n",),
}
"""Proper parts of messages in each format. Each `WORD` is replaced by a different word."""

_BEGINS = {
    "command_r": "Action:",
    "functionary_v31": "<function=",
    "functionary_v32": ">>>",
    "firefunction": "functools",
}
"""The mark before calls, in formats whose marks are never special tokens."""

BETWEEN = ("", "", " ", "\n", "WORD ", "\nWORD", "é")

PIECES = (*"{}[]\"',:\\\n \t/#<>|", "\\d", "//", "}}", "\\u12", "None", "é", "null")


def reader(name: str) -> MessageReader:
    """Returns a reader of the format with a name."""
    inner: MessageReader = PlainReader()
    if name in TOOL_FORMATS:
        rules = CallRules(new_id="id-{}".format, tools=TOOLS)
        inner = TOOL_FORMATS[name].reader(rules)
    if name in REASONING_FORMATS:
        return REASONING_FORMATS[name].reader(inner, has_begun=False)
    return inner


def text_of(name: str, dice: random.Random) -> tuple[str, list[str]]:
    """Returns a damaged message in a format, and the words in it that must not be lost."""
    parts: list[str] = []
    for _ in range(dice.randint(1, 3)):
        parts += [dice.choice(BETWEEN), _damaged(dice.choice(SAMPLES[name]), name, dice)]
    pieces = "".join([*parts, dice.choice(BETWEEN)]).split("WORD")
    words = [f"wörd{number}x" for number in range(len(pieces) - 1)]
    text = pieces[0] + "".join(map("".join, zip(words, pieces[1:], strict=True)))
    return text, words


def _damaged(text: str, name: str, dice: random.Random) -> str:
    """Returns a text with up to three pieces added or left out, not inside a word."""
    family = TOOL_FORMATS.get(name) or REASONING_FORMATS[name]
    parts = text.split("WORD")
    for _ in range(dice.randint(0, 3)):
        index = dice.randrange(len(parts))
        part = parts[index]
        at = dice.randint(0, len(part))
        match dice.randrange(3):
            case 0:
                parts[index] = part[:at] + dice.choice((*PIECES, *family.markers)) + part[at:]
            case 1:
                parts[index] = part[:at] + part[at + dice.randint(1, 3) :]
            case 2:
                parts[index] = part[:at] + part[at : at + 2] * 2 + part[at + 2 :]
    return "WORD".join(parts)


def check(name: str, dice: random.Random) -> None:
    """Reads one text. Raises AssertionError if reading depends on the pieces, or loses a word."""
    text, words = text_of(name, dice)
    whole = read(lambda: reader(name), text)
    cuts = sorted(dice.choices(range(len(text) + 1), k=dice.randint(0, 8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(lambda: reader(name), *pieces) == whole, (name, pieces)
    assert read(lambda: reader(name), *text) == whole, (name, text)
    lost = [word for word in words if word not in _heard(whole)]
    if name == "harmony" or (whole.calls and name in TOOL_FORMATS):
        lost = [word for word in lost if not _may_be_left_out(name, text, word)]
    assert not lost, (name, text, lost, whole)


def _heard(said: Said) -> str:
    calls = "".join(name + arguments for name, arguments in said.calls)
    return said.reasoning + said.content + calls


def _may_be_left_out(name: str, text: str, word: str) -> bool:
    """Returns whether a word may be missing in a message with calls. After a call, the beginning of
    another call is left out if the answer ends in it. Words in a header of Harmony, damaged so that
    they stand there, name a role or a channel."""
    at = text.find(word)
    if name == "harmony":
        return text.find("<|message|>", at) >= 0 or "<|message|>" not in text[:at]
    begin = _BEGINS.get(name) or TOOL_FORMATS[name].markers[0]
    return at > text.rfind(begin)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("formats", nargs="*", choices=[[], *SAMPLES], metavar="FORMAT")
    parser.add_argument("-n", type=int, default=20_000, help="texts of each format")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.formats or SAMPLES:
        dice = random.Random(f"{options.seed}-{name}")
        for _ in range(options.n):
            check(name, dice)
        sys.stdout.write(f"{name}: {options.n} texts\n")


if __name__ == "__main__":
    main()
