"""Lists all formats of messages, in the order in which a checkpoint is checked for them. If chat
templates of format A may also contain the marks of format B, A comes before B."""

from collections.abc import Mapping

from services.frontend.text.formats.apriel import Apriel
from services.frontend.text.formats.command_r import CommandR, CommandR7B
from services.frontend.text.formats.deepseek_v3 import DeepSeekV3, DeepSeekV31
from services.frontend.text.formats.deepseek_v32 import DeepSeekV4, DeepSeekV32
from services.frontend.text.formats.firefunction import FireFunction
from services.frontend.text.formats.functionary import Functionary31, Functionary32
from services.frontend.text.formats.gemma4 import Gemma4
from services.frontend.text.formats.gigachat3 import GigaChat3
from services.frontend.text.formats.glm import Glm, Glm47
from services.frontend.text.formats.granite import Granite
from services.frontend.text.formats.harmony import Harmony, HarmonyReasoning
from services.frontend.text.formats.hermes import Hermes
from services.frontend.text.formats.kimi_k2 import KimiK2
from services.frontend.text.formats.llama3 import Llama3
from services.frontend.text.formats.minimax_m1 import MiniMaxM1
from services.frontend.text.formats.minimax_m2 import MiniMaxM2
from services.frontend.text.formats.mistral import Mistral
from services.frontend.text.formats.nemotron import Nemotron
from services.frontend.text.formats.phi4_mini import Phi4Mini
from services.frontend.text.formats.pythonic import Lfm2, Pythonic
from services.frontend.text.formats.qwen3_coder import Qwen3Coder
from services.frontend.text.formats.reasoning_format import ReasoningFormat
from services.frontend.text.formats.think import FORMATS
from services.frontend.text.formats.tool_format import ToolFormat

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one
    for one in (
        Harmony(),
        Mistral(),
        KimiK2(),
        DeepSeekV32(),
        DeepSeekV4(),
        DeepSeekV3(),
        DeepSeekV31(),
        Gemma4(),
        CommandR7B(),
        CommandR(),
        GigaChat3(),
        Granite(),
        Phi4Mini(),
        Nemotron(),
        Apriel(),
        MiniMaxM1(),
        MiniMaxM2(),
        Lfm2(),
        Qwen3Coder(),
        Glm47(),
        Glm(),
        Functionary31(),
        Functionary32(),
        FireFunction(),
        Hermes(),
        Pythonic(),
        Llama3(),
    )
}
"""Formats of tool calls, keyed by name."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    one.name: one for one in (HarmonyReasoning(), *FORMATS)
}
"""Formats of reasoning, keyed by name."""
