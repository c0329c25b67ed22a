"""The formats of real chat templates are recognised, and what a template writes for a call is read
back."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from services.common import errors
from services.frontend.request.conversation import (
    ChatMessage,
    Conversation,
    EarlierCall,
)
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.formats.registry import TOOL_FORMATS
from services.frontend.text.message_format import MessageFormat
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints
from tests.frontend.text import templates_beside
from tests.frontend.text.formats.reading import TOOLS, read

FORMATS = {
    "Apriel-1.6": "apriel",
    "Cohere2MoE": "command_r7b",
    "CohereForAI-c4ai-command-r-plus": "command_r",
    "CohereForAI-c4ai-command-r7b": "command_r7b",
    "GLM-4.6": "glm45",
    "GLM-4.7": "glm47",
    "GigaChat3": "gigachat3",
    "Kimi-K2": "kimi_k2",
    "LFM2": "lfm2",
    "MiMo": "hermes",
    "MiniMax-M1": "minimax_m1",
    "MiniMax-M2": "minimax_m2",
    "Mistral": "mistral",
    "NVIDIA-Nemotron-3": "qwen3_coder",
    "NVIDIA-Nemotron-Nano": "nemotron",
    "NousResearch-Hermes": "hermes",
    "Qwen-": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "fireworks-ai": "firefunction",
    "google-gemma-4": "gemma4",
    "ibm-granite-granite-3": "granite",
    "ibm-granite-granite-4": "hermes",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "meetkai-functionary-medium-v3.1": "functionary_v31",
    "meetkai-functionary-medium-v3.2": "functionary_v32",
    "meta-llama": "llama3",
    "mistralai": "mistral",
    "moonshotai": "kimi_k2",
    "poolside-Laguna": "glm45",
    "unsloth-Apriel": "apriel",
    "unsloth-mistral": "mistral",
}
"""The format of the templates whose names begin so."""

SHOW_NO_CALLS = {
    "Kimi-K2-Instruct": "appends to a list, which the sandbox refuses, as transformers does",
    "Kimi-K2-Thinking": "appends to a list, which the sandbox refuses, as transformers does",
    "LFM2-8B-A1B": "leaves out the calls of a turn, and shows their results",
    "LFM2.5-Instruct": "leaves out the calls of a turn, and shows their results",
    "fireworks-ai-llama-3-firefunction-v2": "wants a variable `functions`",
    "ibm-granite-granite-3.3-2B-Instruct": "leaves out the calls of a turn, and shows the results",
    "llama-cpp-deepseek-r1": "writes a generator as JSON, which is an error",
}
"""Templates that show no calls, each with the reason."""

MAX_CHARACTERS = 100_000

TEMPLATES = [
    (path, parser)
    for path in templates_beside.PATHS
    for begin, parser in FORMATS.items()
    if path.name.startswith(begin)
]

USER = ChatMessage("user", "hello")
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("find", {"what": 'a "b"\n c', "n": 3, "deep": True, "tags": ["x", "y"]}),
    ("dive", {}),
)


def _tokenizer(directory: Path, *special: str) -> Tokenizer:
    library = checkpoints.byte_level()
    library.add_special_tokens([*special])
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer.from_directory(directory)


def _rendered(template: ChatTemplate, n_calls: int, *, is_exact: bool) -> str:
    """Returns what a template writes for a turn with calls, and after the turn. If `is_exact`, the
    text begins where an answer begins; otherwise before the marks of the turn.

    Raises:
        InvalidRequest: the template refuses the turns.
    """
    calls = tuple(
        EarlierCall(id=f"call00{at:03}", name=name, arguments=json.dumps(arguments))
        for at, (name, arguments) in enumerate(CALLS[:n_calls])
    )
    turn = ChatMessage("assistant", None, tool_calls=calls)
    answers = tuple(ChatMessage("tool", "ok", tool_call_id=call.id) for call in calls)
    short, long = (
        template.render(
            Conversation(messages, tools=TOOLS, adds_generation_prompt=is_exact),
            limit_s=10,
            max_characters=MAX_CHARACTERS,
        )
        for messages in ((USER,), (USER, turn, *answers))
    )
    begins = enumerate(zip(short, long, strict=False))
    return long[next((at for at, (one, other) in begins if one != other), len(short)) :]


@pytest.mark.skipif(not TEMPLATES, reason="there are no chat templates beside the repository")
@pytest.mark.parametrize(
    ("path", "parser"), TEMPLATES, ids=[path.name.removesuffix(".jinja") for path, _ in TEMPLATES]
)
def test_template_has_its_format_and_its_calls_are_read_back(
    tmp_path: Path, path: Path, parser: str
) -> None:
    source = path.read_text()
    special = ("<|python_tag|>",) if parser == "llama3" else ()
    assert MessageFormat(_tokenizer(tmp_path, *special), source).tools == parser
    # A template that shows one call in a turn shows further calls in turns of their own.
    family = TOOL_FORMATS[parser]
    template = ChatTemplate(source, special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})
    is_parallel = family.has_parallel_calls and template.renders_parallel_calls
    n_calls = 2 if is_parallel else 1
    reason = SHOW_NO_CALLS.get(path.name.removesuffix(".jinja"))
    if reason is not None:
        with suppress(errors.InvalidRequest):
            assert "find" not in _rendered(template, n_calls, is_exact=family.has_bare_calls), (
                reason
            )
        return
    text = _rendered(template, n_calls, is_exact=family.has_bare_calls)
    calls = [(name, json.loads(arguments)) for name, arguments in read(parser, [text]).calls]
    assert calls == list(CALLS[:n_calls])
