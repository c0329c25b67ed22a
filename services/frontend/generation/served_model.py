"""The model as its files and the settings say that it is served."""

from dataclasses import dataclass, field
from pathlib import Path

from services.frontend.request.generation_defaults import GenerationDefaults
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.message_format import ReasoningParser, ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """All that is known of the model besides its tokenizer; pipelines tell its limits."""

    names: tuple[str, ...] = ()
    """The names by which clients know the model; without any it is the pipeline's."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """Options of requests that leave them out."""
    chat_template: ChatTemplate | None = None
    """Writes conversations down; without it they are refused."""
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    tokenizer_file: Path | None = None
    """The file from which grammars learn the vocabulary."""
