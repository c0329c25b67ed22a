"""Reads the files of a checkpoint that hold its chat templates, and the special tokens that the
templates use.

The files are looked for in the same order as in the `transformers` library. A file
`chat_template.jinja` replaces all templates of `tokenizer_config.json`. The default template of
older checkpoints may be in `chat_template.json`. Templates with other names are files
`additional_chat_templates/NAME.jinja`. `special_tokens_map.json` is read only if
`tokenizer_config.json` does not list the added tokens. A checkpoint whose only tokenizer is
Mistral's `tekken.json` gets the template of that file's version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from services.common import bounded_file
from services.common.gguf.header import is_gguf, read_header
from services.common.gguf.tokenizer import special_tokens
from services.common.tokenizer_config import MAX_CONFIG_BYTES, TokenizerConfig
from services.common.tokenizer_files import tekken
from services.common.tokenizer_files.find import default_roles, tokenizer_file
from services.frontend.text.tekken_template import END_THINK, THINK, tekken_template

MAX_TEMPLATE_BYTES = 1 << 20
"""Largest size of a template in bytes; long templates have a fiftieth of this size."""

GGUF_TEMPLATE = "tokenizer.chat_template"
"""Key of the template in a GGUF file. A further template has this key, a dot and the template's
name as its key."""

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Name of the template for all conversations, and name of the template for conversations with
tools."""


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """Holds the sources of a checkpoint's chat templates, keyed by name, and the texts of the
    checkpoint's special tokens."""

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]

    @classmethod
    def of_directory(cls, directory: Path) -> Self:
        """Reads the files in a checkpoint's directory.

        Raises:
            OSError: a file cannot be read.
            ValueError, LookupError, TypeError: a file is broken.
        """
        config = TokenizerConfig.of_directory(directory)
        older = _json(directory / "chat_template.json").get("chat_template")
        file, folder = directory / "chat_template.jinja", directory / "additional_chat_templates"
        if file.is_file():
            sources = {DEFAULT: _template(file)}
        else:
            sources = _named(config.keys.get("chat_template")) | _named(older)
        sources |= {other.stem: _template(other) for other in sorted(folder.glob("*.jinja"))}
        tokenizer = tokenizer_file(directory)
        if not sources and tokenizer.name == tekken.FILE:
            sources = _named(_tekken_template(tokenizer))
        return cls(sources, {**default_roles(tokenizer), **config.special_tokens})

    @classmethod
    def of_gguf(cls, file: Path) -> Self:
        """Reads a GGUF file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is broken, or a template is too long.
        """
        metadata = read_header(file).metadata
        keys = {DEFAULT: GGUF_TEMPLATE, WITH_TOOLS: f"{GGUF_TEMPLATE}.{WITH_TOOLS}"}
        found = {name: metadata.get(key) for name, key in keys.items()}
        sources = {name: source for name, source in found.items() if isinstance(source, str)}
        if any(len(source) > MAX_TEMPLATE_BYTES for source in sources.values()):
            raise ValueError(f"{file}: {GGUF_TEMPLATE} has more than {MAX_TEMPLATE_BYTES} bytes")
        return cls(sources, special_tokens(metadata))


def template_source(model: Path) -> str:
    """Returns the name of the file that holds a checkpoint's template, and the template's key if
    the file holds more than the template. If the template is in neither a GGUF file,
    `chat_template.jinja` nor `chat_template.json`, the result names `tokenizer_config.json`, even
    if the template comes from another file."""
    if is_gguf(model):
        return f"{model.name}: {GGUF_TEMPLATE}"
    if (model / "chat_template.jinja").is_file():
        return "chat_template.jinja"
    older = _json(model / "chat_template.json").get("chat_template")
    return "chat_template.json" if older else "tokenizer_config.json: chat_template"


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return bounded_file.read_json_object(path, max_bytes=MAX_CONFIG_BYTES)


def _template(path: Path) -> str:
    return bounded_file.read_bytes(path, max_bytes=MAX_TEMPLATE_BYTES).decode()


def _tekken_template(tokenizer: Path) -> str | None:
    return tekken_template(
        tekken.tekken_version(tokenizer),
        efforts=tekken.reasoning_efforts(tokenizer),
        has_thoughts={THINK, END_THINK} <= tekken.special_tokens(tokenizer),
    )


def _named(template: object) -> dict[str, str]:
    """Returns the templates in `template`, the value of a `chat_template` key, keyed by name. A
    single template gets the name of the default template."""
    if isinstance(template, list):
        return {named["name"]: str(named["template"]) for named in template}
    if isinstance(template, dict):
        return {name: str(source) for name, source in template.items()}
    return {DEFAULT: template} if isinstance(template, str) else {}
