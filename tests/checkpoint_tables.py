"""The tables in `docs/tested-checkpoints.md`, made from the registries of the code and from the
cases of the tests.

`python -m tests.checkpoint_tables` writes them. Each table follows a comment with its name.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from services.worker.models.quantised.gguf_blocks import TYPES
from services.worker.models.quantization_config import METHODS
from services.worker.models.registry import FAMILIES
from services.worker.models.text_half import WRAPPERS
from tests.worker.engine import test_encoders
from tests.worker.models import (
    test_gguf,
    test_gguf_architectures,
    test_models,
    test_mxfp4,
    test_published_formats,
    test_registry,
    test_text_half,
)
from tests.worker.models import test_quantised_checkpoints as test_quantised

PAGE = Path(__file__).parents[1] / "docs" / "tested-checkpoints.md"
TABLE = re.compile(r"(<!-- (families|formats) -->\n)(?:\|.*\n)*")

LABELS = {
    "gptq": "GPTQ", "awq": "AWQ", "auto-round": "AutoRound", "intel/auto-round": "AutoRound",
    "compressed-tensors": "compressed-tensors", "fp8": "FP8", "fbgemm_fp8": "FP8",
    "bitsandbytes": "bitsandbytes", "modelopt": "ModelOpt", "modelopt_fp4": "ModelOpt",
    "modelopt_mixed": "ModelOpt", "mlx": "MLX",
}  # fmt: skip
"""The column of each method of quantisation."""

_KINDS_OF_TEXT = {
    kind: text.architecture for texts in WRAPPERS.values() for kind, text in texts.items()
}
"""The family of each kind of text model in a checkpoint that also takes images."""

FORMATS = ("safetensors", "GGUF", *dict.fromkeys(LABELS.values()), "MXFP4")
_WHOLE, _MATRICES, _NONE = "**T**", "m", ""


def table(kind: str) -> str:
    """Returns the table `families` or `formats`."""
    rows = _families() if kind == "families" else _formats()
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def written(page: str) -> str:
    """Returns the page with its tables replaced by those that follow from code and tests."""
    return TABLE.sub(lambda found: found[1] + table(found[2]), page)


def _label(config: Mapping[str, Any]) -> str:
    return LABELS[
        config.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in config else "mlx")
    ]


def _architecture(config: PreTrainedConfig) -> str:
    """Returns the name of the family to which a configuration of `transformers` belongs."""
    if config.architectures:
        return str(config.architectures[0])
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type))


def _whole_models() -> dict[str, set[str]]:
    """Returns, for each family, the formats in which tests compare whole models with
    `transformers`."""
    found: dict[str, set[str]] = defaultdict(set)
    for config in test_registry.SHAPES.values():
        found[_architecture(config)].add("safetensors")
    for config in test_encoders.ENCODERS.values():
        found[str(MODEL_MAPPING_NAMES[config.model_type])].add("safetensors")
    for half in test_text_half.HALVES.values():
        text = _KINDS_OF_TEXT.get(half.get_text_config().model_type)
        found[text or ""].add("safetensors")
    for config in test_gguf_architectures.CONFIGS.values():
        found[_architecture(config)].add("GGUF")
    found[_architecture(test_mxfp4.CONFIG)].add("MXFP4")
    schemes, published = test_quantised.SCHEMES, test_published_formats.FORMATS
    llama = found["LlamaForCausalLM"]
    llama |= {"safetensors"} if test_models.SHAPES else set()
    llama |= {_label(scheme.config) for scheme in schemes.values()}
    llama |= {_label(published[name].config) for name in test_published_formats.WHOLE_MODELS}
    found["Qwen3MoeForCausalLM"] |= {
        "MLX",
        *(_label(schemes[name].config) for name in test_quantised.OF_EXPERTS),
    }
    found["DeepseekV3ForCausalLM"].add(_label(schemes[test_quantised.OF_LATENTS].config))
    return found


def _families() -> Iterator[tuple[str, ...]]:
    yield "family", *FORMATS
    yield ("---",) * (1 + len(FORMATS))
    whole = _whole_models()
    for family in sorted(FAMILIES):
        cells = [
            _WHOLE if form in whole[family] else _NONE if form in _OF_FAMILIES else _MATRICES
            for form in FORMATS
        ]
        yield family, *cells


_OF_FAMILIES = frozenset(("safetensors", "GGUF", "MXFP4"))
"""Formats whose names and orders of tensors depend on the family."""


def _formats() -> Iterator[tuple[str, ...]]:
    yield "format", "variants", "against"
    yield "---", "---", "---"
    variants: dict[str, list[str]] = defaultdict(list)
    for name, scheme in test_quantised.SCHEMES.items():
        variants[_label(scheme.config)].append(name)
    for name, form in test_published_formats.FORMATS.items():
        variants[_label(form.config)].append(name)
    for label in dict.fromkeys(LABELS[method] for method in (*METHODS, "mlx")):
        yield label, ", ".join(variants[label]), "arithmetic, number by number"
    kinds = ", ".join(f"`{name}`" for name in sorted(TYPES) if name in test_gguf.PACKED)
    yield "GGUF", kinds, "dequantisation by the package `gguf`"
    yield "MXFP4", "gpt-oss's experts", "`transformers`"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
