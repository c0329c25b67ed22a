"""Sources of chat templates, and the configurations that hold them, read and rendered."""

import json
import tempfile
from contextlib import suppress
from pathlib import Path

from services.common import errors
from services.frontend.request.conversation import ChatMessage, Conversation, Tool
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.template_sandbox import TooMuch
from tests.fuzz.coverage.target import Choices, Target, any_bytes

SOURCE = (
    "{% for m in messages if m.role != 'x' %}{% generation %}<{{ m['role'] | upper }}>"
    "{{ m.content | trim }}{% endgeneration %}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{% macro f(a, b=1) %}{{ a ~ b }}{% endmacro %}{{ f(bos_token) }}{% set ns = namespace(x=1) %}"
)
CONFIG = {
    "chat_template": SOURCE,
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "added_tokens_decoder": {"0": {"content": "<s>"}},
}
CONVERSATION = Conversation(
    (ChatMessage("user", "hello"), ChatMessage("assistant", "you", "bob")),
    tools=(Tool(name="find", parameters='{"type": "object"}'),),
)
_DIRECTORY = tempfile.TemporaryDirectory()


def run(data: bytes) -> None:
    """Reads a checkpoint's template. The first byte chooses the file that holds the template."""
    directory = Path(_DIRECTORY.name)
    choices = Choices(data)
    place = choices.number(3)
    template, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    template.unlink(missing_ok=True)
    config.write_text(json.dumps(CONFIG))
    if place == 0:
        template.write_bytes(data[1:])
    elif place == 1:
        config.write_bytes(data[1:])
    else:
        config.write_text(json.dumps(choices.changed(CONFIG, ("pad_token",))))
    try:
        read = ChatTemplate.from_directory(directory)
    except ValueError as error:
        assert str(directory) in str(error), error
        return
    if read is not None:
        with suppress(errors.InvalidRequest, TooMuch):
            read.render(CONVERSATION, limit_s=0.5, max_characters=10_000)


TARGET = Target(
    run=run,
    seeds=[
        *any_bytes(b"\2"),
        b"\0" + SOURCE.encode(),
        b"\1" + json.dumps(CONFIG).encode(),
        b"\1" + json.dumps({"chat_template": [{"name": "default", "template": "x"}]}).encode(),
        *(bytes([2, 0, field, 5, 9]) for field in range(6)),
    ],
    words=["{%", "%}", "{{", "}}", "{#", "#}", "for", "endfor", "if", "elif", "else", "endif", "in",
           "set", "macro", "endmacro", "generation", "endgeneration", "break", "continue", "|",
           "filter", "call", "block", "is defined", "namespace(", "not", "raise_exception(",
           "[::-1]", "import", "include", "extends", "((((((((", "[[[[[[[["],
)  # fmt: skip
