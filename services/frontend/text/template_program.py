"""A chat template as a program: Jinja with the functions that templates may call in the
`transformers` library, in a sandbox that limits the time and the output."""

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from services.frontend.text.template_sandbox import Meter, MeteredEnvironment, metered

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
example `1 + ''`, raise such errors too. An error means that the template does not support the given
messages."""


class TemplateProgram:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the texts of special tokens, keyed by the names that templates use
        for them, for example `bos_token`."""
        environment = MeteredEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.read(source, dict(special_tokens))

    def run(self, variables: Mapping[str, Any], meter: Meter) -> str:
        """Returns the text that the template writes.

        Raises:
            TooMuch: the text is too long, or rendering exceeds the time limit of `meter`.
            Exception: the template does not support the variables. The error is one of
                `TEMPLATE_ERRORS`.
        """
        text: list[str] = []
        n_characters = 0
        with metered(meter):
            for piece in self._template.generate(variables):
                n_characters += len(piece)
                if n_characters > meter.max_characters:
                    raise meter.too_much()
                text.append(piece)
        whole = "".join(text)
        whole.encode()  # raises for halves of characters, which have no tokens
        return whole


class _GenerationBlock(Extension):
    """Jinja extension for the block `{% generation %}`, with which templates mark the assistant's
    text for training. Here the block has no effect."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON in the form that templates expect. Jinja's own filter is not used, because it
    would escape characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
