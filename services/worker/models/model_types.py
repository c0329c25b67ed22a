"""The architecture that each value of `model_type` in `config.json` stands for, as in
`transformers`.

`config.json` names a model twice, by `model_type` and by `architectures`. In files that were edited
by hand, the two may contradict each other. `transformers` uses `model_type`. This project does so,
too, if both keys name families that are served, or if there is no `architectures`.
"""

from __future__ import annotations

from collections.abc import Mapping

ARCHITECTURES: Mapping[str, str] = {
    "bert": "BertModel",
    "camembert": "CamembertModel",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "roberta": "RobertaModel",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "xlm-roberta": "XLMRobertaModel",
}
"""The architecture of each `model_type`, for all families."""

_FAMILIES = {
    "ForSequenceClassification": ("ForCausalLM", "Model"),
    "ForMaskedLM": ("Model",),
    "Model": ("ForCausalLM", "Model"),
}
"""Some architectures are the layers of a family with another head or without one. This maps the
ending of such an architecture's name to the endings that the family's own architecture may have:
`…ForCausalLM` of decoders, `…Model` of encoders. The head that fills in masked tokens is not read,
because encoders only make embeddings and scores."""


def family_architecture(architecture: str) -> str:
    """Returns the name under which the family of `architecture` is served: `LlamaForCausalLM` for
    `LlamaModel` and `LlamaForSequenceClassification`, which are the same layers with no head or
    another head. Returns `architecture` itself if it is such a name, or if no family is known."""
    for end, of_families in _FAMILIES.items():
        stem = architecture.removesuffix(end)
        for family in (f"{stem}{of_family}" for of_family in of_families):
            if architecture.endswith(end) and family in ARCHITECTURES.values():
                return family
    return architecture
