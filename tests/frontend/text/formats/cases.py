"""Answers in each format, and what they say."""

from dataclasses import dataclass, field

OBJECT = '{"what": "a", "n": 3}'
WRONG = '{"what": "a", "n": "x"}'


@dataclass(frozen=True, kw_only=True)
class Case:
    """An answer, and what the answer says."""

    parser: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    ids: tuple[str, ...] = field(default=())


def _qwen(n: str = "3") -> str:
    return (
        "<tool_call>\n<function=find>\n<parameter=what>\na\n</parameter>\n"
        f"<parameter=n>\n{n}\n</parameter>\n</function>\n</tool_call>"
    )


def _tagged(mark: str, block: str, kinds: bool, n: str = "3", more: str = "") -> str:
    text, value = (' string="true"', ' string="false"') if kinds else ("", "")
    return (
        f'<{mark}{block}>\n<{mark}invoke name="find">\n'
        f'<{mark}parameter name="what"{text}>a</{mark}parameter>\n'
        f'<{mark}parameter name="n"{value}>{n}</{mark}parameter>\n'
        f"</{mark}invoke>\n{more}</{mark}{block}>"
    )


def _invoked(mark: str) -> str:
    return f'<{mark}invoke name="dive">\n</{mark}invoke>\n'


def _glm(newline: str, n: str = "3") -> str:
    parts = ["<tool_call>find", "<arg_key>what</arg_key>", "<arg_value>a</arg_value>"]
    parts += ["<arg_key>n</arg_key>", f"<arg_value>{n}</arg_value>", "</tool_call>"]
    return newline.join(parts)


def _deepseek(*calls: tuple[str, str], fence: bool) -> str:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    written = [
        f"{begin}function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```{end}"
        if fence
        else f"{begin}{name}<｜tool▁sep｜>{arguments}{end}"
        for name, arguments in calls
    ]
    inside = ("\n" if fence else "").join(written)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _kimi(*calls: tuple[str, str]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def _json(*calls: tuple[str, str], sep: str = ", ") -> str:
    return sep.join(f'{{"name": "{name}", "arguments": {value}}}' for name, value in calls)


def _cohere(*calls: tuple[str, str]) -> str:
    inside = ",\n    ".join(
        f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {value}}}'
        for name, value in calls
    )
    return f"<|START_ACTION|>[\n    {inside}\n]<|END_ACTION|>"


def _action(*calls: tuple[str, str]) -> str:
    inside = ",\n    ".join(
        f'{{\n        "tool_name": "{name}",\n        "parameters": {value}\n    }}'
        for name, value in calls
    )
    return f"Action:\n```json\n[\n    {inside}\n]```"


FOUND, MISTAKEN, DIVED = ("find", OBJECT), ("find", WRONG), ("dive", "{}")
GEMMA = '<|tool_call>call:find{what:<|"|>a<|"|>,n:3}<tool_call|>'
DSML = "｜DSML｜"
CALLED = [(FOUND,), (FOUND, DIVED), (MISTAKEN,)]
QWEN_DIVE = "<tool_call>\n<function=dive>\n</function>\n</tool_call>"

CANONICAL: dict[str, tuple[str, str, str]] = {
    "qwen3_coder": (_qwen(), f"{_qwen()}\n{QWEN_DIVE}", _qwen("x")),
    "minimax_m2": (
        _tagged("", "minimax:tool_call", False),
        _tagged("", "minimax:tool_call", False, more=_invoked("")),
        _tagged("", "minimax:tool_call", False, n="x"),
    ),
    "deepseek_v32": (
        _tagged(DSML, "function_calls", True),
        _tagged(DSML, "function_calls", True, more=_invoked(DSML)),
        _tagged(DSML, "function_calls", True, n="x"),
    ),
    "deepseek_v4": (
        _tagged(DSML, "tool_calls", True),
        _tagged(DSML, "tool_calls", True, more=_invoked(DSML)),
        _tagged(DSML, "tool_calls", True, n="x"),
    ),
    "glm45": (_glm("\n"), f"{_glm(chr(10))}\n<tool_call>dive\n</tool_call>", _glm("\n", "x")),
    "glm47": (_glm(""), f"{_glm('')}<tool_call>dive</tool_call>", _glm("", "x")),
    "gemma4": (
        GEMMA,
        f"{GEMMA}<|tool_call>call:dive{{}}<tool_call|>",
        GEMMA.replace("n:3", "n:x"),
    ),
    "pythonic": (
        '[find(what="a", n=3)]',
        '[find(what="a", n=3), dive()]',
        '[find(what="a", n="x")]',
    ),
    "lfm2": (
        '<|tool_call_start|>[find(what="a", n=3)]<|tool_call_end|>',
        '<|tool_call_start|>[find(what="a", n=3), dive()]<|tool_call_end|>',
        '<|tool_call_start|>[find(what="a", n="x")]<|tool_call_end|>',
    ),
}
"""For each format one call, two calls, and a call with an argument of a wrong type, as the model is
trained to write calls."""


def _add(parser: str, *texts: str) -> None:
    one, several, wrong = texts
    CANONICAL[parser] = (one, several, wrong)


_add("deepseek_v3", *(_deepseek(*calls, fence=True) for calls in CALLED))
_add("deepseek_v31", *(_deepseek(*calls, fence=False) for calls in CALLED))
_add("kimi_k2", *(_kimi(*calls) for calls in CALLED))
_add("command_r7b", *(_cohere(*calls) for calls in CALLED))
_add("command_r", *(_action(*calls) for calls in CALLED))
_add("granite", *(f"<|tool_call|>[{_json(*calls)}]" for calls in CALLED))
_add("phi4_mini", *(f"<|tool_call|>[{_json(*calls)}]<|/tool_call|>" for calls in CALLED))
_add("nemotron", *(f"<TOOLCALL>[{_json(*calls)}]</TOOLCALL>" for calls in CALLED))
_add("apriel", *(f"<tool_calls>[{_json(*calls)}]</tool_calls>" for calls in CALLED))
_add("firefunction", *(f"functools[{_json(*calls)}]" for calls in CALLED))
_add(
    "minimax_m1",
    *(f"<tool_calls>\n{_json(*calls, sep=chr(10))}\n</tool_calls>" for calls in CALLED),
)
_add(
    "gigachat3",
    *("".join(f"function call<|role_sep|>\n{_json(call)}" for call in calls) for calls in CALLED),
)
_add(
    "functionary_v31",
    *("".join(f"<function={name}>{value}</function>" for name, value in calls) for calls in CALLED),
)

CASES: list[Case] = []
