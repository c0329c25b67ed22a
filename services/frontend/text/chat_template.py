"""Turns a conversation into one text by the template of the checkpoint.

Templates are Jinja programs made for the `transformers` library. This module offers the functions
that templates may call in that library. They run in a sandbox that limits their time and their
output, and see the conversation as plain dictionaries.
"""

import datetime
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import pydantic_core
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from services.common import bounded_file, errors
from services.common.gguf.header import is_gguf, read_header
from services.common.gguf.tokenizer import special_tokens
from services.frontend.request.conversation import ChatMessage, Conversation, EarlierCall, Tool
from services.frontend.text.template_sandbox import Meter, MeteredEnvironment, TooMuch, metered

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that a template can raise when it is compiled or rendered. Expressions of a template, for
example `1 + ''`, raise such errors too: this means that the template does not support the
messages."""

MAX_CONFIG_BYTES = 16 << 20
"""Largest size of a `tokenizer_config.json` in bytes: some such files list a hundred thousand added
tokens."""

GGUF_TEMPLATE = "tokenizer.chat_template"
"""Key of a GGUF file's template. The same key followed by a dot and a name is the key of a further
template."""

MAX_TEMPLATE_BYTES = 1 << 20
"""Largest size of a `chat_template.jinja` in bytes; long templates have a fiftieth of this size."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ChatTemplate:
    """The checkpoint's chat template."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        """`tool_source` is a separate template for conversations with tools, if the checkpoint has
        one."""
        environment = MeteredEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = tool_source or source
        self._template = environment.read(source, dict(special_tokens or {}))
        self._tool_template = self._template
        if tool_source is not None:
            self._tool_template = environment.read(tool_source, dict(special_tokens or {}))
        self._knows_developers = "developer" in source

    @classmethod
    def from_directory(cls, directory: Path) -> Self | None:
        """Returns the template in a checkpoint's directory; None if there is none.

        Raises:
            ValueError: the template, or the configuration that may contain it, is broken.
        """
        try:
            config = _read_config(directory / "tokenizer_config.json")
            file = directory / "chat_template.jinja"
            sources = (
                {"default": bounded_file.read_bytes(file, max_bytes=MAX_TEMPLATE_BYTES).decode()}
                if file.is_file()
                else _named_templates(config.get("chat_template"))
            )
            if "default" not in sources:
                return None
            return cls(
                sources["default"],
                special_tokens=_special_tokens(config),
                tool_source=sources.get("tool_use"),
            )
        except (*TEMPLATE_ERRORS, RecursionError, SyntaxError) as error:
            # Python, to which Jinja compiles, refuses loops or brackets that nest too deeply.
            explanation = " ".join(str(error).split())  # Jinja's have several lines
            raise ValueError(
                f"the chat template or tokenizer_config.json in {directory} is broken: "
                f"{explanation}"
            ) from error

    @classmethod
    def from_model(cls, model: Path) -> Self | None:
        """Returns the template of a checkpoint's directory or of a GGUF file; None if there is
        none.

        Raises:
            OSError: the file cannot be read.
            ValueError: the template, or the file that may contain it, is broken.
        """
        if not is_gguf(model):
            return cls.from_directory(model)
        metadata = read_header(model).metadata
        source = metadata.get(GGUF_TEMPLATE)
        with_tools = metadata.get(f"{GGUF_TEMPLATE}.tool_use")
        if not isinstance(source, str):
            return None
        if max(len(source), len(with_tools or "")) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"{model}: {GGUF_TEMPLATE} has more than {MAX_TEMPLATE_BYTES} bytes")
        try:
            return cls(source, special_tokens=special_tokens(metadata), tool_source=with_tools)
        except (*TEMPLATE_ERRORS, RecursionError, SyntaxError) as error:
            explanation = " ".join(str(error).split())
            raise ValueError(f"{model}: {GGUF_TEMPLATE} is broken: {explanation}") from error

    def render(self, conversation: Conversation, *, limit_s: float, max_characters: int) -> str:
        """Returns the text of a conversation, up to the place where the answer begins: a new turn
        of the assistant or, with `continues_last`, the end of the last turn.

        Raises:
            TooMuch: the text would have more than `max_characters` characters. The subclass
            TooSlow: rendering took more than `limit_s` seconds of processor time.
            InvalidRequest: the template refuses the conversation, or leaves out the content that
            should go on.
        """
        tag = _new_tag() if conversation.continues_last else ""
        meter = Meter(limit_s=limit_s, max_characters=max_characters)
        shows_tools = conversation.tool_choice.mode != "none" and bool(conversation.tools)
        template = self._tool_template if shows_tools else self._template
        tools = [_tool(tool) for tool in conversation.tools] if shows_tools else None
        variables = {
            "documents": None,
            **conversation.template_kwargs,
            "messages": self._turns(conversation, tag),
            "tools": tools,
            "add_generation_prompt": conversation.adds_generation_prompt,
        }
        try:
            with metered(meter):
                text = _joined(template.generate(variables), meter)
            text.encode()  # raises for halves of characters, which have no tokens
        except TooMuch:
            raise
        except TEMPLATE_ERRORS as error:
            raise errors.InvalidRequest(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        return _cut(text, tag) if tag else text

    def _turns(self, conversation: Conversation, tag: str) -> list[dict[str, Any]]:
        """Returns the turns; the content of the last one ends with a tag, unless it is blank."""
        turns = [self._turn(message) for message in conversation.messages]
        if tag and turns[-1]["content"].strip():
            turns[-1]["content"] += tag
        return turns

    def _turn(self, message: ChatMessage) -> dict[str, Any]:
        """Returns a turn in the form that templates expect: missing fields are left out."""
        role = message.role
        if role == "developer" and not self._knows_developers:
            role = "system"
        turn: dict[str, Any] = {"role": role, "content": message.content or ""}
        given = {
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "reasoning_content": message.reasoning_content,
        }
        turn |= {name: value for name, value in given.items() if value is not None}
        if message.tool_calls:
            turn["tool_calls"] = [_call(call) for call in message.tool_calls]
        return turn


def _call(call: EarlierCall) -> dict[str, Any]:
    """Returns a call in the form that templates expect. The arguments become an object if their
    text is a JSON object."""
    function = {"name": call.name, "arguments": _read(call.arguments, call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    """Returns a tool in the form that OpenAI's clients write."""
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters:
        function["parameters"] = _read(tool.parameters, {})
    return {"type": "function", "function": function}


def _read(text: str, otherwise: object) -> object:
    """Returns the JSON object in a text, or `otherwise` if there is none."""
    try:
        value = pydantic_core.from_json(text.encode())
    except ValueError:
        return otherwise
    return value if isinstance(value, dict) else otherwise


def _new_tag() -> str:
    """Returns a random text: digits, which templates leave as they are, and a space, which shows
    whether they strip contents."""
    return f"{secrets.randbelow(10**18):018} "


def _cut(text: str, tag: str) -> str:
    """Returns the text before the tag. If the template has stripped the white space of the tag, the
    white space at the end of the result is stripped too.

    Raises:
        InvalidRequest: the text does not contain the tag.
    """
    at = text.rfind(tag.rstrip())
    if at < 0:
        raise errors.InvalidRequest(
            "continue_final_message", "needs a last message whose content the template shows"
        )
    return text[:at] if text.startswith(tag, at) else text[:at].rstrip()


def _joined(pieces: Iterable[str], meter: Meter) -> str:
    text: list[str] = []
    n_characters = 0
    for piece in pieces:
        n_characters += len(piece)
        if n_characters > meter.max_characters:
            raise meter.too_much()
        text.append(piece)
    return "".join(text)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant writes, for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return bounded_file.read_json_object(path, max_bytes=MAX_CONFIG_BYTES)


def _named_templates(template: object) -> dict[str, str]:
    """Returns templates by their names; a single template has the name "default"."""
    if isinstance(template, list):
        return {named["name"]: str(named["template"]) for named in template}
    return {"default": template} if isinstance(template, str) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of special tokens, which a configuration holds as strings or as
    `{"content": ...}`."""
    tokens = {name: config.get(name) for name in SPECIAL_TOKENS}
    return {
        name: token["content"] if isinstance(token, dict) else str(token)
        for name, token in tokens.items()
        if token is not None
    }


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON in the form that templates expect: the filter of Jinja itself would escape
    HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
