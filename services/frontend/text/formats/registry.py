"""All formats of messages, in the order in which they are looked for in a checkpoint: a format
stands before those whose marks its templates may hold too."""

from collections.abc import Mapping

from services.frontend.text.formats.hermes import Hermes
from services.frontend.text.formats.llama3 import Llama3
from services.frontend.text.formats.mistral import Mistral
from services.frontend.text.formats.reasoning_format import ReasoningFormat
from services.frontend.text.formats.think import Think
from services.frontend.text.formats.tool_format import ToolFormat

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        Mistral(),
        Hermes(),
        Llama3(),
    )
}
"""Formats of tool calls by name."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {one.name: one for one in (Think(),)}
"""Formats of reasoning by name."""
