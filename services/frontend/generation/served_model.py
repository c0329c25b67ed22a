"""The model as its files and the settings describe it."""

from dataclasses import dataclass, field
from pathlib import Path

from services.frontend.request.generation_defaults import GenerationDefaults
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.message_format import MessageFormat
from services.frontend.text.tokenizer import Tokenizer


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
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    tokenizer_file: Path | None = None
    """File from which the vocabulary is read to check grammars; None if there is no such file."""

    def message_format(self, tokenizer: Tokenizer) -> MessageFormat:
        """Returns the format of the model's messages."""
        template = self.chat_template
        return MessageFormat(
            tokenizer,
            "" if template is None else template.source,
            renders_parallel_calls=template is None or template.renders_parallel_calls,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
        )
