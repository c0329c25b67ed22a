"""Converts the tensors of a checkpoint to the tensors that llama.cpp's converter writes."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from torch import Tensor

Json = Mapping[str, Any]

ADDS_ONE = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
NEIGHBOURS = ("llama", "granite", "smollm3", "mistral3")
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
EXPERT = re.compile(r"(.*experts)\.(\d+)\.(\w+)\.weight")
STREAM = re.compile(r"(model\.altup_\w+)\.(\d+)\.weight")


def arranged(tensors: Mapping[str, Tensor], config: Json, architecture: str) -> dict[str, Tensor]:
    """Returns the tensors of a GGUF file by their names in the file."""
    known = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    n_layers = config.get("num_hidden_layers", config.get("n_layer", 0))
    names = get_tensor_name_map(known, n_layers)
    if config.get("tie_word_embeddings"):
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    found = dict(extra(config, architecture))
    for name, tensor in stacked(tensors).items():
        for own, changed in changes(name, tensor, config, architecture):
            found[gguf_name(own, names)] = changed
    return found


def gguf_name(name: str, names: TensorNameMap) -> str:
    """Returns the name in a GGUF file of a tensor with a name in the checkpoint. Raises KeyError if
    there is none."""
    if name.startswith(("blk.", "rope_")):
        return name
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise KeyError(name)
    return found


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors by name. Tensors of numbered experts, and of numbered streams (Gemma 3n),
    are stacked to one tensor."""
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if of_expert := EXPERT.fullmatch(name):
            stack = f"{of_expert[1]}.{of_expert[3]}.weight"
            parts.setdefault(stack, {})[int(of_expert[2])] = tensor
        elif of_stream := STREAM.fullmatch(name):
            parts.setdefault(f"{of_stream[1]}.weight", {})[int(of_stream[2])] = tensor
        else:
            found[name] = tensor
    for name, items in parts.items():
        found[name] = torch.stack([items[i] for i in range(len(items))])
    return found


def changes(
    name: str, tensor: Tensor, config: Json, architecture: str
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors to which llama.cpp's converter changes a tensor of a checkpoint, with
    names that the package's table knows."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    block = f"blk.{layer[1]}" if layer else ""
    if architecture in NEIGHBOURS and re.search(r"[qk]_proj\.", name):
        is_query = ".q_proj." in name or "num_key_value_heads" not in config
        heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
        pairs = tensor.view(heads, 2, -1, *tensor.shape[1:])
        yield name, pairs.transpose(1, 2).reshape(tensor.shape)
    elif architecture in ADDS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, tensor + 1
    elif architecture == "gpt2" and name.endswith(
        ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    ):
        yield name, tensor.t()
    elif name.endswith("kv_b_proj.weight"):
        yield from of_latents(name, tensor, config)
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("_bias", ".bias"), tensor
    elif architecture == "gpt-oss":
        yield from of_gpt_oss(name, tensor)
    elif architecture in HYBRIDS:
        yield from of_hybrid(name, tensor, config, architecture, block)
    else:
        yield of_gemma(name, block), tensor


def of_gemma(name: str, block: str) -> str:
    """Returns the name of a tensor with an ending. A name without `.weight` or `.bias`, as Gemma
    has some, gets the ending that the table needs."""
    if name.endswith("router.scale"):
        return f"{block}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"{block}.ffn_down_exps.scale"
    has_ending = name.endswith((".weight", ".bias"))
    return name if has_ending else f"{name}.weight"


def of_latents(name: str, tensor: Tensor, config: Json) -> Iterator[tuple[str, Tensor]]:
    n_still, n_values = config["qk_nope_head_dim"], config["v_head_dim"]
    both = tensor.view(config["num_attention_heads"], n_still + n_values, -1)
    keys, values = torch.split(both, [n_still, n_values], 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def of_gpt_oss(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif "experts" not in name:
        yield name, tensor
    else:
        stem, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
        ending = ".bias" if is_bias else ".weight"
        outputs_first = tensor if is_bias else tensor.transpose(1, 2)
        if "down" in name:
            yield stem + ending, outputs_first
        else:
            for part, first in (("gate", 0), ("up", 1)):
                yield stem.replace("gate_up", part) + ending, outputs_first[:, first::2]


def of_hybrid(
    name: str, tensor: Tensor, config: Json, architecture: str, block: str
) -> Iterator[tuple[str, Tensor]]:
    n_keys, n_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    if part == "conv1d":
        tensor = tensor.squeeze(1)
    if architecture == "qwen3next":
        if part == "in_proj_qkvz":
            per_key = n_values // n_keys * value_dim
            groups = tensor.view(n_keys, -1, tensor.shape[1])
            kinds = torch.split(groups, [key_dim, key_dim, per_key, per_key], 1)
            q, k, v, z = (kind.flatten(0, 1) for kind in kinds)
            yield f"{block}.attn_qkv.weight", torch.cat((q, k, v))
            yield f"{block}.attn_gate.weight", z
            return
    else:
        tensor = tiled(part, tensor, n_keys, n_values, key_dim, value_dim)
    if part == "A_log":
        yield name, -tensor.exp()
    elif part == "dt_bias":
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    elif "experts" in name and "gate_up_proj" in name:
        gate, up = tensor.chunk(2, 1)
        yield name.replace("gate_up_proj", "gate_proj") + ".weight", gate
        yield name.replace("gate_up_proj", "up_proj") + ".weight", up
    elif "experts" in name and not name.endswith(".weight"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def tiled(
    part: str, tensor: Tensor, n_keys: int, n_values: int, key_dim: int, value_dim: int
) -> Tensor:
    """Returns a tensor of a linear attention layer in llama.cpp's order of value heads: first the
    first value head of every key head, then the second one of every key head, and so on."""

    def mixed(x: Tensor, size: int) -> Tensor:
        heads = x.reshape(n_keys, n_values // n_keys, size, *x.shape[1:])
        return heads.transpose(0, 1).reshape(x.shape)

    n_first = 2 * n_keys * key_dim
    if part in ("in_proj_qkv", "conv1d"):
        return torch.cat((tensor[:n_first], mixed(tensor[n_first:], value_dim)))
    if part == "in_proj_z":
        return mixed(tensor, value_dim)
    if part == "out_proj":
        return mixed(tensor.t(), value_dim).t()
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return mixed(tensor, 1)
    return tensor


def extra(config: Json, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in which GGUF files have rotary settings."""
    rope = config.get("rope_parameters") or {}
    if architecture == "gemma4":
        own: Json = next(iter((config.get("per_layer_config") or {}).values()), {})
        size: int = own.get("head_dim") or config["global_head_dim"]
        n_turned = int(size * rope["full_attention"]["partial_rotary_factor"] / 2)
        factors = [1.0] * n_turned + [1e30] * (size // 2 - n_turned)
        yield "rope_freqs.weight", torch.tensor(factors)
    elif rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    elif rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3(rope, config)


def llama3(rope: Json, config: Json) -> Tensor:
    """Returns the numbers by which the rotary type "llama3" divides the frequencies, [head_dim /
    2]."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    waves = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (rope["original_max_position_embeddings"] / waves - low) / (high - low)
    share = share.clamp(0, 1)
    factors: Tensor = 1 / ((1 - share) / rope["factor"] + share)
    return factors
