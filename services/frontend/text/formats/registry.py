"""All formats of messages, in the order in which they are looked for in a checkpoint: a format
stands before those whose marks its templates may hold too."""

from collections.abc import Mapping

from services.frontend.text.formats.harmony import Harmony, HarmonyReasoning
from services.frontend.text.formats.hermes import Hermes
from services.frontend.text.formats.llama3 import Llama3
from services.frontend.text.formats.mistral import Mistral
from services.frontend.text.formats.reasoning_format import ReasoningFormat
from services.frontend.text.formats.think import FORMATS
from services.frontend.text.formats.tool_format import ToolFormat

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        Harmony(),
        Mistral(),
        Hermes(),
        Llama3(),
    )
}
"""Formats of tool calls by name."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    one.name: one for one in (HarmonyReasoning(), *FORMATS)
}
"""Formats of reasoning by name."""
