"""Writes random adapters in PEFT's format, and merges adapters into a model of `transformers`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_PREFIX = "base_model.model."


def write_adapter(
    directory: Path,
    model: torch.nn.Module | Mapping[str, tuple[int, int]],
    targets: Sequence[str],
    *,
    rank: int = 4,
    alpha: float = 16,
    seed: int = 0,
    std: float = 0.3,
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """Writes a random adapter into `directory`, and returns `directory`. The adapter changes the
    modules of `model` whose names end with one of `targets`. `ranks` has the ranks of modules that
    differ from `rank`, by the ends of their names. Other keyword arguments are keys of the
    configuration."""
    ranks = ranks or {}
    sizes = model if isinstance(model, Mapping) else sizes_of(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (n_out, n_in) in sizes.items():
        end = name.rsplit(".", 1)[-1]
        if end not in targets:
            continue
        size = ranks.get(end, rank)
        for side, shape in (("A", (size, n_in)), ("B", (n_out, size))):
            values = torch.randn(shape, generator=generator) * std / math.sqrt(size)
            tensors[f"{_PREFIX}{name}.lora_{side}.weight"] = values.to(dtype)
    assert tensors, f"no module ends with one of {targets}"
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "rank_pattern": dict(ranks),
        "lora_dropout": 0.05,
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(written))
    return directory


def sizes_of(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Returns the numbers of outputs and inputs of all linear layers of a model, by the name of the
    module."""
    sizes = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Linear):
            sizes[name] = (weight.shape[0], weight.shape[1])
        elif type(module).__name__ == "Conv1D":  # of GPT-2, which stores the transpose
            sizes[name] = (weight.shape[1], weight.shape[0])
    return sizes


def merge(model: torch.nn.Module, adapter: Path) -> None:
    """Adds the matrices `scale * B @ A` of an adapter to the weights of a model, in float32."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key, a in tensors.items():
        if not key.endswith("lora_A.weight"):
            continue
        name = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        b = tensors[key.replace("lora_A", "lora_B")]
        rank = a.shape[0]
        alpha = config.get("alpha_pattern", {}).get(name.rsplit(".", 1)[-1], config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        module = model.get_submodule(name)
        change = scale * b.float() @ a.float()
        change = change.T if type(module).__name__ == "Conv1D" else change
        # A new tensor: an embedding that shares the matrix stays as it is, as with PEFT.
        weight: Any = module.weight
        module.weight = torch.nn.Parameter(weight.detach() + change, requires_grad=False)
