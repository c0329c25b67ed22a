"""Reads the length of the model's context from the files of the checkpoint.

The length bounds the characters of a prompt, and so the memory of a frontend, before any pipeline
serves the model. The pipeline may serve a shorter context.

The length may be stated in two ways: by a key such as `max_position_embeddings`, and by a rotary
setting that stretches an original length by a factor. Many model cards advise to add only such a
setting, so the longer of the two lengths is used, as in vLLM. For the types "yarn" and "linear" the
stretched length is the original length times the factor. For other types the stretched length never
exceeds `max_position_embeddings`.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from services.common import bounded_file
from services.common.derived import Derived
from services.common.gguf.header import is_gguf, read_header

CONFIG = "config.json"

MAX_CONFIG_BYTES = 16 << 20
"""Largest size of a `config.json` in bytes."""

NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
"""Keys of `config.json` in which families of models state the length of the context."""

MAX_LENGTH = 2**31 - 1
"""Longest context in tokens: positions are 32-bit integers."""

STRETCHING, GGUF_STRETCHING = ("yarn", "linear"), ("yarn",)
"""Types of rotary settings whose factor lengthens the context, in `config.json` and in GGUF files.
In a GGUF file, the stated length already includes the factor of "linear"."""

_LONGEST = "model_max_length"
"""Key of `config.json` in which Command R states the length of its context. In these files the
value of `max_position_embeddings` is smaller."""
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = ("longrope", "su")  # "su" in older files
_COUNTED = "gemma3"  # models whose `max_position_embeddings` counts the factor


def context_length(model: Path) -> int | None:
    """Returns the length in tokens of the context that a checkpoint states. `model` is a
    checkpoint's directory or a GGUF file. Returns None if the files are missing or broken, or do
    not state the length."""
    try:
        if is_gguf(model):
            stated = stated_context(_gguf_config(read_header(model).metadata), GGUF_STRETCHING)
            return stated.value if stated else None
        config = bounded_file.read_json_object(model / CONFIG, max_bytes=MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return None
    inner = config.get("text_config")
    stated = stated_context(config) or stated_context(inner if isinstance(inner, dict) else {})
    return stated.value if stated else None


def default_context(config: Mapping[str, Any]) -> int | None:
    """Returns the length in tokens of the context that is served by default: the length that a
    `config.json` states, or the original length for "longrope". Returns None if no key states a
    length."""
    stated = stated_context(config)
    if stated is None:
        return None
    _, rope = _rope(config)
    if (rope.get("rope_type") or rope.get("type")) not in _LONGROPE:
        return stated.value
    original = _whole(config.get(_ORIGINAL)) or _whole(rope.get(_ORIGINAL))
    return min(stated.value, original or stated.value)


def _gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the entries about the context in a GGUF file's metadata to keys of `config.json`."""
    prefix = f"{metadata.get('general.architecture')}"
    rope = {
        "rope_type": metadata.get(f"{prefix}.rope.scaling.type"),
        "factor": metadata.get(f"{prefix}.rope.scaling.factor"),
        _ORIGINAL: metadata.get(f"{prefix}.rope.scaling.original_context_length"),
    }
    return {NAMES[0]: metadata.get(f"{prefix}.context_length"), "rope_scaling": rope}


def stated_context(
    config: Mapping[str, Any], stretching: Collection[str] = STRETCHING
) -> Derived[int] | None:
    """Returns the longest context that a `config.json` states, or None if no key states one.

    `stretching` are the types of rotary settings whose factor lengthens the context.
    """
    plain = next(
        (Derived(length, name) for name in NAMES if (length := _whole(config.get(name)))), None
    )
    if longest := _whole(config.get(_LONGEST)):
        return Derived(longest, _LONGEST)
    stretched = _stretched(config, plain, stretching)
    if stretched is None or (plain is not None and plain.value >= stretched.value):
        return plain
    return stretched


def _stretched(
    config: Mapping[str, Any], plain: Derived[int] | None, stretching: Collection[str]
) -> Derived[int] | None:
    """Returns the stretched length: the original length times the factor of the rotary setting.
    Returns None if no rotary setting stretches the context, or if the length under the plain key
    includes the factor already (Gemma 3)."""
    if str(config.get("model_type")).startswith(_COUNTED):
        return None
    key, rope = _rope(config)
    if (rope.get("rope_type") or rope.get("type")) not in stretching:
        return None
    given = _whole(rope.get(_ORIGINAL)) or _whole(config.get(_ORIGINAL))
    original = Derived(given, _ORIGINAL) if given else plain
    factor = rope.get("factor")
    if original is None or not isinstance(factor, int | float) or not 1 < factor < MAX_LENGTH:
        return None
    length = min(int(original.value * factor), MAX_LENGTH)
    return Derived(length, f"{original.source} {original.value} times {key}.factor {factor:g}")


def _rope(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the key under which a `config.json` has its rotary settings, and the settings. The
    key is `rope_parameters`, or `rope_scaling` in older files. If a file has both keys, a setting
    is taken from `rope_scaling` only if `rope_parameters` lacks it.
    """
    both = [config.get(key) for key in ("rope_scaling", "rope_parameters")]
    old, new = (rope if isinstance(rope, dict) else {} for rope in both)
    return "rope_parameters" if new else "rope_scaling", {**old, **new}


def _whole(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
