"""Answers in each format, and the messages that readers must make of them."""

from dataclasses import dataclass, field

OBJECT = '{"what": "a", "n": 3}'
WRONG = '{"what": "a", "n": "x"}'


@dataclass(frozen=True, kw_only=True)
class Case:
    """An answer as text, and the message that a reader must make of it."""

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
_add(
    "functionary_v32",
    *(">>>".join(f"{name}\n{value}" for name, value in calls) for calls in CALLED),
)


def _params(*pairs: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in pairs)
    return f"<tool_call>\n<function=find>\n{inside}</function>\n</tool_call>"


ONE = (("find", '{"what": "a"}'),)
BOTH = (("find", '{"what": "a"}'), ("dive", "{}"))

CASES: list[Case] = [
    Case(
        parser="qwen3_coder",
        text="Let me see.\n\n" + _params(("what", ' x = "1"\n\n  y\\n')) + "\n",
        content="Let me see.\n\n",
        calls=(("find", r'{"what": " x = \"1\"\n\n  y\\n"}'),),
    ),
    Case(
        parser="qwen3_coder",
        text=_params(("n", "3"), ("deep", "True"), ("tags", '["a", "b"]'), ("near", "None")),
        calls=(("find", '{"n": 3, "deep": true, "tags": ["a", "b"], "near": null}'),),
    ),
    Case(
        parser="qwen3_coder",
        text=_params(("n", "three"), ("deep", "false"), ("tags", "['a', 'b',]"), ("near", "12")),
        calls=(("find", '{"n": "three", "deep": false, "tags": ["a", "b"], "near": "12"}'),),
    ),
    Case(
        parser="qwen3_coder",
        text=_params(("what", "12"), ("more", '{"a": [1]}'), ("other", "o k"), ("last", "NaN")),
        calls=(("find", '{"what": "12", "more": {"a": [1]}, "other": "o k", "last": "NaN"}'),),
    ),
    Case(
        parser="qwen3_coder",
        text="<tool_call>\n<function=swim>\n<parameter=far>\n1.50\n</parameter>\n</function>\n"
        "<function=dive>\n</function>\n</tool_call>\n</tool_call>\nDone.",
        content="\nDone.",
        calls=(("swim", '{"far": 1.50}'), ("dive", "{}")),
    ),
    Case(
        parser="qwen3_coder",
        text="<function=find><parameter=what>a</parameter></function>",
        calls=ONE,
    ),
    Case(
        parser="qwen3_coder",
        text="<tool_call>\n<function=find>\n<parameter=what>\na</parameter>\n</tool_call>",
        calls=ONE,
    ),
    Case(
        parser="qwen3_coder",
        text='<tool_call>\n{"name": "find", "arguments": {"what": "a"}}\n</tool_call>',
        calls=ONE,
    ),
    Case(
        parser="qwen3_coder",
        text="A <tool_call> and a <function name, or <function=\n>.",
        content="A <tool_call> and a <function name, or <function=\n>.",
    ),
    Case(
        parser="qwen3_coder",
        text="<tool_call>\n<function=dive>\nwell\n</function>\n</tool_call>",
        content="\nwell\n</function>\n</tool_call>",
        calls=(("dive", "{}"),),
    ),
    Case(
        parser="minimax_m2",
        text='Hm.\n<minimax:tool_call>\n<invoke name="find">\n<parameter name="what"> a\n'
        '</parameter>\n<parameter name="deep">true</parameter>\n</invoke>\n'
        '<invoke name="dive">\n</invoke>\n</minimax:tool_call>',
        content="Hm.\n",
        calls=(("find", '{"what": " a\\n", "deep": true}'), ("dive", "{}")),
    ),
    Case(
        parser="deepseek_v32",
        text=f'<{DSML}function_calls>\n<{DSML}invoke name="swim">\n'
        f'<{DSML}parameter name="a" string="true">1</{DSML}parameter>\n'
        f'<{DSML}parameter name="b" string="false">1</{DSML}parameter>\n'
        f'<{DSML}parameter name="c" string="false">{{"x": null}}</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls>",
        calls=(("swim", '{"a": "1", "b": 1, "c": {"x": null}}'),),
    ),
    Case(
        parser="deepseek_v4",
        text=f'So:\n\n<{DSML}tool_calls>\n<{DSML}invoke name="find">\n'
        f'<{DSML}parameter name="n" string="true">3</{DSML}parameter>\n'
        f'<{DSML}parameter name="what" string="false">3</{DSML}parameter>\n'
        f'</{DSML}invoke>\n<{DSML}invoke name="dive">\n\n</{DSML}invoke>\n</{DSML}tool_calls>',
        content="So:\n\n",
        calls=(("find", '{"n": 3, "what": "3"}'), ("dive", "{}")),
    ),
    Case(
        parser="glm45",
        text="\nOk.\n<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>a\n b</arg_value>\n"
        "<arg_key>tags</arg_key>\n<arg_value>[]</arg_value>\n</tool_call>\n"
        "<tool_call>dive\n</tool_call>",
        content="\nOk.\n",
        calls=(("find", '{"what": "a\\n b", "tags": []}'), ("dive", "{}")),
    ),
    Case(
        parser="glm47",
        text="<tool_call>find<arg_key>what</arg_key><arg_value>a</arg_value></tool_call>"
        "<tool_call>dive</tool_call>",
        calls=BOTH,
    ),
    Case(
        parser="glm45",
        text="The tag <tool_call> begins a call; <tool_call>f(x)</tool_call> is none.",
        content="The tag <tool_call> begins a call; <tool_call>f(x)</tool_call> is none.",
    ),
    Case(
        parser="deepseek_v3",
        text="So." + _deepseek(("find", '{"what": "a"}'), ("dive", "{}"), fence=True),
        content="So.",
        calls=BOTH,
    ),
    Case(
        parser="deepseek_v31",
        text=_deepseek(("find", '{"what": "a"}'), ("dive", ""), fence=False),
        calls=BOTH,
    ),
    Case(
        parser="deepseek_v31",
        text="<｜tool▁calls▁begin｜> is a mark",
        content="<｜tool▁calls▁begin｜> is a mark",
    ),
    Case(
        parser="kimi_k2",
        text="So." + _kimi(("find", '{"what": "a"}'), ("dive", "{}")),
        content="So.",
        calls=BOTH,
        ids=("functions.find:0", "functions.dive:1"),
    ),
    Case(
        parser="kimi_k2",
        text="<|tool_calls_section_begin|> <|tool_call_begin|> functions.find:17 "
        '<|tool_call_argument_begin|> {"what": "a"} <|tool_call_end|><|tool_call_begin|>dive'
        "<|tool_call_argument_begin|><|tool_call_end|> <|tool_calls_section_end|> ",
        calls=BOTH,
        ids=("functions.find:17", "functions.dive:1"),
    ),
    Case(
        parser="kimi_k2",
        text=_kimi(("dive", "{}")) + _kimi(("dive", "{}")),
        calls=(("dive", "{}"), ("dive", "{}")),
        ids=("functions.dive:0", "functions.dive:1"),
    ),
    Case(
        parser="command_r7b",
        text="<|START_RESPONSE|>Hello.<|END_RESPONSE|>",
        content="Hello.",
    ),
    Case(parser="command_r7b", text=_cohere(*BOTH), calls=BOTH),
    Case(
        parser="command_r",
        text="I will search.\nAction: ```json\n[\n"
        '{"tool_name": "find", "parameters": {"what": "a"}}]\n```',
        content="I will search.\n",
        calls=ONE,
    ),
    Case(
        parser="command_r",
        text='Action:\n```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```',
        content='Action:\n```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```',
    ),
    Case(
        parser="gemma4",
        text='Ok.<|tool_call>call:find{what:<|"|>it\'s "a\\b", {x}<|"|>,deep:true,near:null,'
        'tags:[<|"|>x<|"|>,<|"|>y<|"|>]}<tool_call|><|tool_response>',
        content="Ok.",
        calls=(
            (
                "find",
                '{"what": "it\'s \\"a\\\\b\\", {x}", "deep": true, "near": null, '
                '"tags": ["x", "y"]}',
            ),
        ),
    ),
    Case(
        parser="gemma4",
        text='<|tool_call>call:swim{a:{b:[1,2.5,{}]},c:<|"|><|"|>,d:"e"}}<tool_call|>',
        calls=(("swim", '{"a": {"b": [1, 2.5, {}]}, "c": "", "d": "e"}'),),
    ),
    Case(
        parser="gemma4",
        text="<|tool_call>call:swim{a:[1 2]}<tool_call|>",
        content="2]}<tool_call|>",
        calls=(("swim", '{"a": [1]}'),),
    ),
    Case(
        parser="pythonic",
        text="[dive(a=[1, 2 + 3], b=4)]",
        content="+ 3], b=4)]",
        calls=(("dive", '{"a": [1, 2]}'),),
    ),
    Case(parser="gemma4", text="<|tool_call>no call", content="<|tool_call>no call"),
    Case(
        parser="pythonic",
        text=" [find(what='it\\'s \"a\"\\n', n = 0x10, deep=False, tags=('x', \"y\"),), dive()]\n",
        calls=(
            ("find", '{"what": "it\'s \\"a\\"\\n", "n": 16, "deep": false, "tags": ["x", "y"]}'),
            ("dive", "{}"),
        ),
    ),
    Case(
        parser="pythonic",
        text="Sure:\n[find('a', 3, near=None)]",
        content="Sure:\n",
        calls=(("find", '{"what": "a", "n": 3, "near": null}'),),
    ),
    Case(
        parser="pythonic",
        text='[find(what="""a \'b\' "c"\n""", tags=[{\'x\': 1.5}], n=x.y)]',
        calls=(("find", '{"what": "a \'b\' \\"c\\"\\n", "tags": [{"x": 1.5}], "n": "x.y"}'),),
    ),
    Case(
        parser="pythonic",
        text='<|python_start|>[find(what="\\u00e9\\x41\\ud83d\\ude00")]<|python_end|>',
        calls=(("find", '{"what": "éA\\ud83d\\ude00"}'),),
    ),
    Case(
        parser="pythonic",
        text="[swim(n=1)] and [find](x) and [find(n=1)] are\n[1, 2]",
        content="[swim(n=1)] and [find](x) and [find(n=1)] are\n[1, 2]",
    ),
    Case(
        parser="lfm2",
        text="Ok<|tool_call_start|>[swim(a=-1.5e3, b={'c': [True]})]<|tool_call_end|>Done.",
        content="OkDone.",
        calls=(("swim", '{"a": -1.5e3, "b": {"c": [true]}}'),),
    ),
    Case(
        parser="lfm2",
        text=f"<|tool_call_start|>[{_json(*BOTH)}]<|tool_call_end|>",
        calls=BOTH,
    ),
    Case(parser="lfm2", text="[find(what='a')]", content="[find(what='a')]"),
    Case(
        parser="granite",
        text=f"<|tool_call|>[{_json(*BOTH)}]",
        calls=BOTH,
    ),
    Case(parser="granite", text=f"<tool_call>[{_json(*ONE)}]</tool_call>", calls=ONE),
    Case(
        parser="phi4_mini",
        text=f"<|tool_call|>[{_json(*BOTH)}]<|/tool_call|>",
        calls=BOTH,
    ),
    Case(parser="phi4_mini", text=f"functools[{_json(*ONE)}]", calls=ONE),
    Case(parser="phi4_mini", text="functools is a module", content="functools is a module"),
    Case(
        parser="nemotron",
        text=f"Ok.\n<TOOLCALL>[{_json(*ONE)}}}]</TOOLCALL>",
        content="Ok.\n",
        calls=ONE,
    ),
    Case(
        parser="apriel",
        text=f'\n<tool_calls>[{{"name": "find", "arguments": {{"what": "a"}}, "id": "1"}}, '
        f"{_json(BOTH[1])}]</tool_calls>",
        calls=BOTH,
    ),
    Case(
        parser="minimax_m1",
        text=f"<tool_calls>\n{_json(*BOTH, sep=chr(10))}\n</tool_calls>",
        calls=BOTH,
    ),
    Case(
        parser="gigachat3",
        text=f"Ok.<|message_sep|>\n\nfunction call<|role_sep|>\n{_json(*ONE)}<|message_sep|>\n\n",
        content="Ok.",
        calls=ONE,
    ),
    Case(
        parser="functionary_v31",
        text='<function=find>{"what": "a"}</function><function=dive>{}</function>',
        calls=BOTH,
    ),
    Case(
        parser="functionary_v31",
        text="Write <function=name> and <function=x>y</function>.",
        content="Write <function=name> and <function=x>y</function>.",
    ),
    Case(
        parser="functionary_v32",
        text='all\nLet me see.\n>>>find\n{"what": "a"}>>>dive\n{}',
        content="Let me see.\n",
        calls=BOTH,
    ),
    Case(
        parser="functionary_v32",
        text='find\n{"what": "a"}>>>all\nDone.',
        content="Done.",
        calls=ONE,
    ),
    Case(
        parser="functionary_v32",
        text="all\nType\n>>> find\n>>> find(1)\nall\n>>>find\nit",
        content="Type\n>>> find\n>>> find(1)\nall\n>>>find\nit",
    ),
    Case(
        parser="functionary_v32",
        text="wonder\n{}",
        content="wonder\n{}",
    ),
    Case(
        parser="firefunction",
        text=f"Ok. functools[{_json(*BOTH)}]",
        content="Ok. ",
        calls=BOTH,
    ),
]
