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

TEKKEN_PLACE = f"built in, for the version in {tekken.FILE}"
"""Place of a template that no file of the checkpoint holds."""

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Name of the template for all conversations, and name of the template for conversations with
tools."""


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """Holds a checkpoint's chat templates, and the texts of the checkpoint's special tokens."""

    sources: Mapping[str, str]
    """Source code of each template, keyed by the template's name."""
    places: Mapping[str, str]
    """Place of each template, keyed by the template's name: the file that holds the template, and
    the template's key if the file holds more than the template. `TEKKEN_PLACE` if no file holds
    it."""
    special_tokens: Mapping[str, str]
    """Texts of the special tokens by their roles, such as `bos_token`."""

    @classmethod
    def of_model(cls, model: Path) -> Self:
        """Reads a checkpoint's directory or a GGUF file. Raises the errors of `of_directory`."""
        return cls.of_gguf(model) if is_gguf(model) else cls.of_directory(model)

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
        found: list[tuple[str, Mapping[str, str]]]  # later templates replace those of equal names
        if file.is_file():
            found = [(file.name, {DEFAULT: _template(file)})]
        else:
            found = [
                ("tokenizer_config.json: chat_template", _named(config.keys.get("chat_template"))),
                ("chat_template.json", _named(older)),
            ]
        for other in sorted(folder.glob("*.jinja")):
            found.append((f"{folder.name}/{other.name}", {other.stem: _template(other)}))
        tokenizer = tokenizer_file(directory)
        if not any(named for _, named in found) and tokenizer.name == tekken.FILE:
            found = [(TEKKEN_PLACE, _named(_tekken_template(tokenizer)))]
        return cls(
            {name: source for _, named in found for name, source in named.items()},
            {name: place for place, named in found for name in named},
            {**default_roles(tokenizer), **config.special_tokens},
        )

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
        places = {name: f"{file.name}: {keys[name]}" for name in sources}
        return cls(sources, places, special_tokens(metadata))


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
