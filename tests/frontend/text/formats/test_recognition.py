"""The format of tool calls is found from a checkpoint's template and its special tokens."""

from pathlib import Path

import pytest

from services.frontend.text.formats.registry import TOOL_FORMATS
from services.frontend.text.message_format import MessageFormat
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints
from tests.frontend.text.formats.cases import CANONICAL, CASES

TEMPLATES = [
    ("qwen3_coder", "{{ tools }}<tool_call>\n<function=' ~ name ~ '>\n</tool_call>", ""),
    ("hermes", "{{ tools }}<tool_call>\n{{ call | tojson }}\n</tool_call>", ""),
    ("glm45", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", ""),
    ("glm47", "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>", ""),
    ("minimax_m2", "{% set begin = '<minimax:tool_call>' %}<invoke name=", ""),
    ("minimax_m1", "<tool_calls>\n{'name': <tool-name>}\n</tool_calls>", ""),
    ("apriel", "within <tool_call></tool_call> tags: <tool_calls>[{}]</tool_calls>", ""),
    ("deepseek_v3", "<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\n```json\n'", ""),
    ("deepseek_v31", "<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments", ""),
    ("deepseek_v31", "{{ messages }}", "<｜tool▁call▁begin｜>"),
    ("deepseek_v32", "{% set mark = '｜DSML｜' %}<' + mark + 'function_calls>", ""),
    ("deepseek_v4", "{% set mark = '｜DSML｜' %}<' + mark + 'tool_calls>", "<｜tool▁call▁begin｜>"),
    ("kimi_k2", "{{ messages }}", "<|tool_call_argument_begin|>"),
    ("gemma4", "{{- '<|tool_call>call:' + name -}}", ""),
    ("command_r7b", "<|START_THINKING|><|START_ACTION|>[", ""),
    ("command_r", 'Action:\n```json\n[{"tool_name": title}]```', ""),
    ("granite", "<|start_of_role|>system: respond with <|tool_call|> and a list", ""),
    ("phi4_mini", "<|system|><|tool|>{{ tools }}<|/tool|>", "<|tool_call|>"),
    ("nemotron", "<AVAILABLE_TOOLS> <TOOLCALL>[{}]</TOOLCALL>", ""),
    ("lfm2", "List of tools: [{{ tools }}]", ""),
    ("lfm2", "{{ messages }}", "<|tool_call_start|>"),
    ("gigachat3", "role: function call{{ '<|role_sep|>' }}", ""),
    ("functionary_v31", '<function=name>{"a": 1}</function>', ""),
    ("functionary_v32", r"{{ '>>>all\n' + message.content }}>>>", ""),
    ("firefunction", "functools[{}, ...]", ""),
    ("pythonic", "[func_name1(params_name1=params_value1), func_name2(params)]", ""),
    ("llama3", "{{ tools }}", "<|python_tag|>"),
    ("mistral", "{{ messages }}", "[TOOL_CALLS]"),
]


@pytest.mark.parametrize(("parser", "template", "special"), TEMPLATES)
def test_format_is_found(tmp_path: Path, parser: str, template: str, special: str) -> None:
    library = checkpoints.byte_level()
    library.add_special_tokens([special] if special else [])
    library.save(str(tmp_path / "tokenizer.json"))
    assert MessageFormat(Tokenizer.from_directory(tmp_path), template).tools == parser


def test_each_format_has_cases() -> None:
    with_own_tests = {"harmony", "mistral", "hermes", "llama3"}
    assert set(CANONICAL) == set(TOOL_FORMATS) - with_own_tests
    assert {case.parser for case in CASES} == set(CANONICAL)
    assert {parser for parser, _, _ in TEMPLATES} == set(TOOL_FORMATS) - {"harmony"}
