"""A conversation as one text, written with the template that the checkpoint brings along.

Templates are Jinja programs made for the `transformers` library; what they may call there they
find here. They run in a sandbox that limits their time and their output, and see the conversation
as plain dictionaries.
"""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from services.common import bounded_file, errors
from services.frontend.request.conversation import ChatMessage
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
"""The errors that a template can raise when it is read or rendered. Its own expressions raise such
errors too, `1 + ''` for example: it suits other messages."""

MAX_CONFIG_BYTES = 16 << 20
"""Bytes of a `tokenizer_config.json` at most: some list a hundred thousand added tokens."""

MAX_TEMPLATE_BYTES = 1 << 20
"""Bytes of a `chat_template.jinja` at most; long ones have a fiftieth."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ChatTemplate:
    """The checkpoint's chat template."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = MeteredEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.read(source, dict(special_tokens or {}))

    @classmethod
    def from_directory(cls, directory: Path) -> Self | None:
        """Returns the template of a checkpoint; None if it has none.

        Raises:
            ValueError: the template is broken, or the configuration that may hold it.
        """
        try:
            config = _read_config(directory / "tokenizer_config.json")
            file = directory / "chat_template.jinja"
            source = (
                bounded_file.read_bytes(file, max_bytes=MAX_TEMPLATE_BYTES).decode()
                if file.is_file()
                else _default_template(config.get("chat_template"))
            )
            if source is None:
                return None
            return cls(source, special_tokens=_special_tokens(config))
        except (*TEMPLATE_ERRORS, RecursionError, SyntaxError) as error:
            # Jinja compiles to Python, which gives up on too many loops or brackets in each other.
            explanation = " ".join(str(error).split())  # Jinja's have several lines
            raise ValueError(
                f"the chat template or tokenizer_config.json in {directory} is broken: "
                f"{explanation}"
            ) from error

    def render(
        self, messages: Sequence[ChatMessage], *, limit_s: float, max_characters: int
    ) -> str:
        """Returns the conversation's text, up to where the assistant's turn begins.

        Raises:
            TooMuch: it would have more characters than that, or TooSlow: it took more than so many
            seconds of the processor.
            InvalidRequest: the template refuses the conversation.
        """
        meter = Meter(limit_s=limit_s, max_characters=max_characters)
        try:
            with metered(meter):
                pieces = self._template.generate(
                    messages=[_to_dict(message) for message in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                )
                text = _joined(pieces, meter)
            text.encode()  # a template can make halves of characters, of which there are no tokens
            return text
        except TooMuch:
            raise
        except TEMPLATE_ERRORS as error:
            raise errors.InvalidRequest(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error


def _to_dict(message: ChatMessage) -> dict[str, Any]:
    """Returns a turn as templates want it: a name that was not given is left out."""
    turn = {"role": message.role, "content": message.content}
    return turn if message.name is None else {**turn, "name": message.name}


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
    """`{% generation %}` marks the assistant's words for training; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return bounded_file.read_json_object(path, max_bytes=MAX_CONFIG_BYTES)


def _default_template(template: object) -> str | None:
    """Returns the template itself, or the one called "default" in a list of named ones."""
    if isinstance(template, list):
        return {named["name"]: str(named["template"]) for named in template}.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of special tokens; a configuration holds them as strings or as `{"content":
    ...}`."""
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
    """Returns JSON as templates expect it: Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
