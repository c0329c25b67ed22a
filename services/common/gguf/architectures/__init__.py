"""The supported architectures of GGUF files, by the value of `general.architecture`."""

from collections.abc import Mapping

from services.common.gguf.architecture import Architecture
from services.common.gguf.architectures.cohere import COHERE2, COMMAND_R
from services.common.gguf.architectures.deepseek2 import DEEPSEEK2
from services.common.gguf.architectures.gemma import GEMMA, GEMMA2, GEMMA3
from services.common.gguf.architectures.gemma_shared import GEMMA3N, GEMMA4
from services.common.gguf.architectures.glm import CHATGLM, GLM4
from services.common.gguf.architectures.gpt_oss import GPT_OSS
from services.common.gguf.architectures.llama import GRANITE, LLAMA, MISTRAL3, SMOLLM3
from services.common.gguf.architectures.olmo import OLMO2, OLMOE
from services.common.gguf.architectures.phi3 import PHI3
from services.common.gguf.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from services.common.gguf.architectures.qwen_hybrid import QWEN3_NEXT, QWEN35, QWEN35_MOE
from services.common.gguf.architectures.single import (
    ERNIE4_5,
    EXAONE4,
    GPT2,
    SEED_OSS,
    STARCODER2,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "chatglm": CHATGLM,
    "cohere2": COHERE2,
    "command-r": COMMAND_R,
    "deepseek2": DEEPSEEK2,
    "ernie4_5": ERNIE4_5,
    "exaone4": EXAONE4,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "glm4": GLM4,
    "gpt-oss": GPT_OSS,
    "gpt2": GPT2,
    "granite": GRANITE,
    "llama": LLAMA,
    "mistral3": MISTRAL3,
    "olmo2": OLMO2,
    "olmoe": OLMOE,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2moe": QWEN2_MOE,
    "qwen2vl": QWEN2,
    "qwen3": QWEN3,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "qwen3moe": QWEN3_MOE,
    "qwen3next": QWEN3_NEXT,
    "qwen3vl": QWEN3,
    "qwen3vlmoe": QWEN3_MOE,
    "seed_oss": SEED_OSS,
    "smollm3": SMOLLM3,
    "starcoder2": STARCODER2,
}
"""The description of each architecture, by its name. Several names may have the same description.
"""
