"""Translates a GGUF file's metadata to the keys of `config.json`, for the supported architectures.

So the rules for `config.json` hold for GGUF files too. An unknown key of the architecture is
refused, with its name in the error, unless its value switches its feature off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.common.gguf.header import GgufHeader

Config = dict[str, Any]

# Keys of every architecture, behind its name, and what `config.json` calls them.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# What is read below, or says again what tensors say.
_OTHERS = frozenset((
    "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.type", "vocab_size",
))  # fmt: skip
_GEMMA_OTHERS = frozenset((
    "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
    "rope.freq_base_swa",
))  # fmt: skip

# Tokens that end a turn, in the words of the models that chat: files name one end at most.
_ENDS_OF_TURNS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|endofturn|>",
))  # fmt: skip
_CONTROL = 3  # the type of a token that is no text


def _llama(header: GgufHeader, config: Config) -> Config:
    has = header.tensors.__contains__
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": has("blk.0.attn_q.bias"),
        "mlp_bias": has("blk.0.ffn_gate.bias"),
    }


def _qwen2(header: GgufHeader, config: Config) -> Config:
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen3(header: GgufHeader, config: Config) -> Config:
    return {"architectures": ["Qwen3ForCausalLM"]}


def _gemma(header: GgufHeader, config: Config, *, large: int) -> Config:
    """Returns the keys that Gemma 2 and 3 share. Models with `large` layers scale attention scores
    in another way."""
    hidden_size, n_heads = config["hidden_size"], config["num_attention_heads"]
    scalar = config.get("head_dim", 256)
    if config["num_hidden_layers"] == large:
        scalar = hidden_size // n_heads
    return {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": _get(header, "attention.sliding_window", int),
    }


def _gemma2(header: GgufHeader, config: Config) -> Config:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        "architectures": ["Gemma2ForCausalLM"],
        **_gemma(header, config, large=46),
        **{cap: _get(header, cap, float) for cap in caps},
    }


def _gemma3(header: GgufHeader, config: Config) -> Config:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **_gemma(header, config, large=62),
        "final_logit_softcapping": _get(header, "final_logit_softcapping", float, None),
        "rope_local_base_freq": _get(header, "rope.freq_base_swa", float, 10_000.0),
        "rope_theta": config.get("rope_theta", 1_000_000.0),
    }


ARCHITECTURES: Mapping[str, Callable[[GgufHeader, Config], Config]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def model_config(header: GgufHeader) -> Config:
    """Returns the configuration in the form of `config.json`.

    Raises:
        ValueError: the architecture or one of its keys is not known, or a key is missing.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        named = repr(architecture)[:80]
        raise ValueError(
            f"{header.path}: general.architecture {named} is not one of {sorted(ARCHITECTURES)}"
        )
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ValueError(f"{header.path}: split.count: a model in several files is not supported")
    _refuse_unknown(header, architecture)
    config: Config = {
        key: _get(header, name, int if name != "attention.layer_norm_rms_epsilon" else float)
        for name, key in _SIZES.items()
        if name not in ("attention.head_count_kv", "rope.freq_base")
    }
    config["num_key_value_heads"] = _get(
        header, "attention.head_count_kv", int, config["num_attention_heads"]
    )
    theta = _get(header, "rope.freq_base", float, None)
    config |= {} if theta is None else {"rope_theta": theta}
    config |= _head_dim(header, config) | _rope_scaling(header)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else None
    return {
        **config,
        "vocab_size": vocab_size or _get(header, "vocab_size", int),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "eos_token_id": _eos_token_ids(header.metadata),
        "torch_dtype": _element_type(header.metadata.get("general.file_type")),
        **ARCHITECTURES[architecture](header, config),
    }


def frequency_factors(header: GgufHeader) -> tuple[float, ...] | None:
    """Returns the divisors of the rotary frequencies, one per pair; None if the file has none.

    Raises:
        OSError, ValueError: the divisors cannot be read.
    """
    name = "rope_freqs.weight"
    return header.floats(name) if name in header.tensors else None


def _get(header: GgufHeader, key: str, kind: type, *default: Any) -> Any:
    """Returns the value of an architecture's key; raises ValueError unless the value has the
    type."""
    name = f"{header.metadata['general.architecture']}.{key}"
    value = header.metadata.get(name)
    if value is None and default:
        return default[0]
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ValueError(f"{header.path}: {name} is {repr(value)[:80]}, and not one number")
    return kind(value)


def _refuse_unknown(header: GgufHeader, architecture: str) -> None:
    """Raises ValueError for keys of the architecture that are not read."""
    known = _SIZES.keys() | _OTHERS | (_GEMMA_OTHERS if "gemma" in architecture else set())
    prefix = f"{architecture}."
    unknown = [
        key
        for key, value in header.metadata.items()
        if key.startswith(prefix) and value and key.removeprefix(prefix) not in known
    ]
    if unknown:
        raise ValueError(f"{header.path}: {sorted(unknown)[:8]} are not supported")


def _head_dim(header: GgufHeader, config: Config) -> Config:
    """Returns the size of heads, if the file has one; keys, values and positions must agree."""
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    said = {size for key in keys if (size := _get(header, key, int, None)) is not None}
    if len(said) > 1:
        raise ValueError(f"{header.path}: {', '.join(keys)} are {sorted(said)}, not one number")
    return {"head_dim": said.pop()} if said else {}


def _rope_scaling(header: GgufHeader) -> Config:
    """Returns the keys that say how positions are scaled beyond the context length of the
    training."""
    kind = header.metadata.get(f"{header.metadata['general.architecture']}.rope.scaling.type")
    if kind in (None, "none"):
        return {}
    if kind != "linear":
        raise ValueError(f"{header.path}: rope.scaling.type {repr(kind)[:80]} is not supported")
    factor = _get(header, "rope.scaling.factor", float)
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}


def _element_type(file_type: Any) -> str:
    """Returns the element type for `--dtype auto`; quantised files are computed in bfloat16."""
    if file_type in (0, 1):
        return "float32" if file_type == 0 else "float16"
    return "bfloat16"


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the tokens that end an output: the tokens that the file names, and ends of turns."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    tokens, types = (
        metadata.get(f"tokenizer.ggml.{name}", ()) for name in ("tokens", "token_type")
    )
    ids += [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _ENDS_OF_TURNS
    ]
    return list(dict.fromkeys(one for one in ids if isinstance(one, int)))
