"""The facts about a model that are known from its files and the settings, even if no pipeline
serves it."""

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.common.errors import InvalidRequest
from services.frontend.generation.receipts import ReceiptIssuer
from services.frontend.request.generation_defaults import GenerationDefaults
from services.frontend.request.generation_request import GenerationOptions
from services.frontend.request.json_schema.client_schema import AdditionalProperties
from services.frontend.request.vector_defaults import VectorDefaults
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.message_format import MessageFormat
from services.frontend.text.pair_format import PairFormat
from services.frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Facts about a model that are known from its files and the settings, while no pipeline serves
    it. The tokenizer is kept elsewhere, and the limits of the model come from the pipeline that
    serves it."""

    names: tuple[str, ...] = ()
    """Names by which clients know the model. If there are none, the pipeline's name for the model
    is used."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """Defaults for options that a request leaves out."""
    chat_template: ChatTemplate | None = None
    """Template that turns a conversation into a text; without one, conversations are refused."""
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    additional_properties: AdditionalProperties = "declared"
    """Which members an object may have besides its `properties`, if its JSON schema does not
    say."""
    tokenizer_file: Path | None = None
    """File from which the vocabulary is read when grammars are checked; None if there is no such
    file."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time at which the model's files were written, in seconds since 1970."""

    vectors: VectorDefaults = field(default_factory=VectorDefaults)
    """Prompts for embeddings and allowed lengths of embeddings, from the checkpoint's files."""

    pairs: PairFormat = field(default_factory=PairFormat)
    """Makes the prompt in which the model compares two texts."""

    receipts: ReceiptIssuer | None = None
    """Issuer of the receipts of answers; None if no receipts are made."""

    def applied(self, options: GenerationOptions) -> GenerationOptions:
        """Returns the options with the defaults of the model. The format of the output is replaced
        by the format that this server enforces. Returns `options` itself if nothing changes.

        Raises:
            InvalidRequest: the schema of the format cannot be enforced, or the request asks for a
            receipt and this server makes none.
        """
        if self.receipts is None and options.receipt:
            raise InvalidRequest("receipt", "is not served here: the setting `receipts` is off")
        if self.receipts is not None and self.receipts.are_always_made:
            is_asked = options.receipt
            options = replace(options, receipt=True, is_receipt_optional=not is_asked)
        options = self.defaults.apply(options)
        found = options.format.with_additional(self.additional_properties)
        return options if found.schema is options.format_schema else options.with_format(found)

    def message_format(self, tokenizer: Tokenizer) -> MessageFormat:
        """Returns the format of the model's messages."""
        template = self.chat_template
        return MessageFormat(
            tokenizer,
            "" if template is None else template.source,
            renders_parallel_calls=template is None or template.renders_parallel_calls,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
            additional_properties=self.additional_properties,
        )


def model_created_at(model: Path) -> int:
    """Returns the time at which a checkpoint's configuration or a GGUF file was written, in seconds
    since 1970. If there is no such file, returns the current time."""
    for file in (model / "config.json", model):
        with suppress(OSError):
            return int(file.stat().st_mtime)
    return int(time.time())
