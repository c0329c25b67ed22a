"""The settings of one model that a frontend serves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ToolParser = Literal[
    "auto",
    "none",
    "harmony",
    "mistral",
    "kimi_k2",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v3",
    "deepseek_v31",
    "gemma4",
    "command_r7b",
    "command_r",
    "gigachat3",
    "granite",
    "phi4_mini",
    "nemotron",
    "apriel",
    "minimax_m1",
    "minimax_m2",
    "lfm2",
    "qwen3_coder",
    "glm47",
    "glm45",
    "functionary_v31",
    "functionary_v32",
    "firefunction",
    "hermes",
    "pythonic",
    "llama3",
]

ReasoningParser = Literal[
    "auto", "none", "harmony", "granite", "command", "magistral", "kimi", "seed", "gemma4", "think"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The settings of one model; `FrontendSettings` explains them."""

    path: Path
    """Directory of the checkpoint, or a GGUF file."""
    scheduler: str
    """Address of the schedulers of the model."""
    names: tuple[str, ...] = ()
    """Names by which clients know the model. If there are none, the name that the workers report is
    used."""
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    pair_template: str = ""
