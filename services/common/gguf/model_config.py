"""Translates a GGUF file's metadata to the keys of `config.json`, for the supported architectures.

The rules for `config.json` thus apply to GGUF files too. A key that is unknown for the architecture
is refused with an error that names it, unless the value of the key switches its feature off.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.gguf.architecture import SIZES, Architecture, Config, Metadata
from services.common.gguf.architectures import ARCHITECTURES
from services.common.gguf.header import GgufHeader, token_id_of
from services.common.gguf.rope import KEYS as ROPE_KEYS
from services.common.gguf.rope import rope_scaling

# Sizes that a file may leave out.
_OPTIONAL = frozenset((
    "attention.head_count_kv", "attention.key_length", "feed_forward_length", "rope.freq_base",
))  # fmt: skip
# Keys of every architecture that are read below, or say again what tensors say. The last one
# concerns the program that wrote the file.
_OTHERS = frozenset((
    "attention.causal", "attention.value_length", "block_count", "nextn_predict_layers",
    "vocab_size", "tensor_data_layout",
))  # fmt: skip
_LAYERS = "block_count"
MAX_LAYERS = 1 << 12
"""Largest number of layers. The limit bounds the lists of the configuration, which have an item for
each layer."""
_DEFAULT_BASE = 10_000.0  # rotary base of files that do not name one

# Tokens that end a turn or a text, in the words of the models: files name one end at most. The list
# is llama.cpp's, as far as it concerns the models that are served.
_ENDS_OF_TURNS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|endofturn|>",
    "<turn|>", "<|return|>", "<|call|>", "[|endofturn|]", "<|END_OF_TURN_TOKEN|>", "[EOT]",
    "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "<end_of_utterance>",
))  # fmt: skip
# In OpenAI's harmony format, each message has an end, and these two tokens end a turn.
_HARMONY = frozenset(("<|return|>", "<|call|>"))
_END_OF_MESSAGE = "<|end|>"
_CONTROL = 3  # the type of a token that is no text


def architecture_of(header: GgufHeader) -> Architecture:
    """Returns the description of a file's architecture. Raises ValueError if the architecture is
    not supported."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{header.path}: general.architecture {repr(name)[:80]} is not one of "
            f"{sorted(ARCHITECTURES)}; if Orcinus serves the family, take its files in safetensors"
        )
    return ARCHITECTURES[name]


def model_config(header: GgufHeader) -> Config:
    """Returns the configuration in the form of `config.json`.

    Raises:
        OSError: a tensor that belongs to the configuration cannot be read.
        ValueError: the architecture or one of its keys is not known, or a key is missing.
    """
    architecture = architecture_of(header)
    said = Metadata(header, str(header.metadata["general.architecture"]))
    sizes = {**SIZES, **architecture.renamed}
    _refuse_unknown(said, architecture)
    config: Config = {
        sizes.get(_LAYERS, "num_hidden_layers"): _n_layers(said),
        **_translated(said, {key: name for key, name in sizes.items() if key != _LAYERS}),
        **_translated(said, architecture.keys, optional=architecture.keys.keys()),
        **architecture.constants,
    }
    if sizes["attention.head_count_kv"] and "num_key_value_heads" not in config:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if architecture.has_rope:
        config |= _heads(said, architecture, config)
        if scaling := rope_scaling(said):
            config["rope_scaling"] = scaling
    config |= {
        "architectures": [architecture.family],
        "vocab_size": _vocab_size(said),
        "tie_word_embeddings": not said.has("output.weight"),
        "eos_token_id": _eos_token_ids(header.metadata),
        "torch_dtype": _element_type(header.metadata.get("general.file_type")),
        **architecture.constants,
    }
    config |= architecture.more(said, config)
    if architecture.has_rope and "rope_parameters" not in config:
        config.setdefault("rope_theta", _DEFAULT_BASE)
    return config


def frequency_factors(header: GgufHeader) -> tuple[float, ...] | None:
    """Returns the divisors of the rotary frequencies, one for each rotated pair, or None if the
    file has none.

    Raises:
        OSError, ValueError: the divisors cannot be read.
    """
    name = "rope_freqs.weight"
    if name not in header.tensors or not architecture_of(header).has_rope:
        return None
    return header.floats(name)


def _n_layers(said: Metadata) -> int:
    """Returns the number of layers. Additional layers that predict several tokens ahead are not
    counted."""
    n_layers = said.needed(_LAYERS) - (said.integer("nextn_predict_layers") or 0)
    if not 0 < n_layers <= MAX_LAYERS:
        raise ValueError(f"{said.name(_LAYERS)} means {n_layers} layers")
    return n_layers


def _translated(said: Metadata, names: Mapping[str, str], *, optional: Any = _OPTIONAL) -> Config:
    """Reads the numbers under some keys of a file, and returns them by the names that they have in
    `config.json`. `names` maps each key to this name; a key with an empty name is ignored. A key
    that is in `optional` may be missing, and is then left out of the result.

    Raises:
        ValueError: the file lacks a key that is not in `optional`.
    """
    config: Config = {}
    for key, name in names.items():
        value = said.number(key) if name else None
        if value is not None:
            config[name] = value
        elif name and key not in optional:
            raise ValueError(f"{said.name(key)} is missing")
    return config


def _vocab_size(said: Metadata) -> int:
    """Returns the size of the vocabulary: the number of rows of the embedding table. If the file
    lacks this table, returns the length of the token list, or the value of the key `vocab_size` if
    there is no such list either."""
    n_rows = said.n_rows("token_embd.weight")
    if n_rows is not None:
        return n_rows
    tokens = said.header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else said.needed("vocab_size")


def _refuse_unknown(said: Metadata, architecture: Architecture) -> None:
    """Raises ValueError if the file has a key of the architecture that this module does not know
    and whose value is not 0, false or empty, or if attention is not causal."""
    known = SIZES.keys() | architecture.keys.keys() | architecture.others | ROPE_KEYS | _OTHERS
    unknown = sorted(
        said.name(key).rpartition(": ")[2]
        for key, value in said.keys().items()
        if key not in known and (any(value) if isinstance(value, list) else value)
    )
    if unknown:
        raise ValueError(f"{said.header.path}: {unknown[:8]} are not supported")
    if said.value("attention.causal") is False:
        raise ValueError(f"{said.name('attention.causal')} is false: the model completes no text")


def _heads(said: Metadata, architecture: Architecture, config: Config) -> Config:
    """Returns the configuration keys for the size of heads and, if an architecture rotates only a
    part of each head, for the rotated fraction.

    If an architecture rotates whole heads, the sizes of keys, values and rotated elements must be
    equal.

    Raises:
        ValueError: these sizes differ.
    """
    if architecture.renamed.get("attention.key_length") == "":
        return {}
    sizes = ["attention.key_length", "attention.value_length"]
    sizes += [] if architecture.is_partial else ["rope.dimension_count"]
    found = {size for key in sizes if (size := said.integer(key)) is not None}
    if len(found) > 1:
        raise ValueError(
            f"{said.header.path}: {', '.join(sizes)} are {sorted(found)}, not one number"
        )
    heads: Config = {"head_dim": found.pop()} if found else {}
    n_rotated = said.integer("rope.dimension_count")
    if architecture.is_partial and n_rotated:
        n_heads = max(1, config["num_attention_heads"])
        whole = heads.get("head_dim") or config["hidden_size"] // n_heads
        heads["partial_rotary_factor"] = n_rotated / max(1, whole)
    return heads


def _element_type(file_type: Any) -> str:
    """Returns the name of the element type with which a model is computed by default: the type in
    the file, or bfloat16 if the file is quantised."""
    if file_type in (0, 1):
        return "float32" if file_type == 0 else "float16"
    return "bfloat16"


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the ids of the tokens that end an output: the tokens that the metadata names, and
    known end-of-turn tokens."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [token_id_of(metadata, name) for name in names]
    tokens, types = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not (isinstance(tokens, list) and isinstance(types, Sequence | array)):
        tokens = types = ()
    ends = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _ENDS_OF_TURNS
    }
    if ends.keys() >= _HARMONY:
        ends.pop(_END_OF_MESSAGE, None)
    ids += ends.values()
    return list(dict.fromkeys(one for one in ids if one is not None))
