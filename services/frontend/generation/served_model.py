"""The model as its files and the settings describe it."""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from services.frontend.request.generation_defaults import GenerationDefaults
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.message_format import ReasoningParser, ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The facts about the model, besides its tokenizer, that do not depend on the pipeline. The
    limits of the model come from the pipeline that serves it."""

    names: tuple[str, ...] = ()
    """Names by which clients know the model. If there are none, the pipeline's name for the model
    is used."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """Defaults for options that a request leaves out."""
    chat_template: ChatTemplate | None = None
    """Template that turns a conversation into a text; without one, conversations are refused."""
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    tokenizer_file: Path | None = None
    """File from which the vocabulary is read to check grammars; None if there is no such file."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time at which the model's files were written, in seconds since 1970."""


def model_created_at(model: Path) -> int:
    """Returns the time at which a checkpoint's configuration or a GGUF file was written, in seconds
    since 1970. Without such a file, returns the current time."""
    for file in (model / "config.json", model):
        with suppress(OSError):
            return int(file.stat().st_mtime)
    return int(time.time())
