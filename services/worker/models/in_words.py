"""Describes values of a configuration in words. Each description also says where the value comes
from, such as a key of `config.json`."""

from __future__ import annotations

from services.common.derived import Derived
from services.worker.models.config import JsonObject, ModelConfig
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.served_context import original_context
from services.worker.models.weight_format import MatrixFormat


def rope_in_words(config: ModelConfig, keys: JsonObject) -> Derived[str]:
    """Returns a text about the type, the base and the factor of the rotary angles. `keys` is the
    content of the configuration file. The origin in the result names the keys that were used."""
    if not isinstance(config, RotaryConfig):
        return Derived("none", f"family {config.architecture}")
    rope = config.rope
    words = [rope.rope_type, f"base {rope.rope_theta:g}"]
    original = original_context(config)
    if original is not None:
        is_long = config.max_position_embeddings > original
        words.append(f"{'long' if is_long else 'short'} factors")
    elif rope.factor is not None:
        words.append(f"factor {rope.factor:g}")
    if rope.frequency_factors is not None:
        words.append("with the factors of the file")
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    given = [name for name in names if keys.get(name)]
    return Derived(", ".join(words), " and ".join(given) or "defaults of the family")


def quantisation_in_words(config: ModelConfig, keys: JsonObject) -> Derived[str]:
    """Returns a text about how the checkpoint stores its matrices. `keys` is the content of the
    configuration file."""
    given = next((keys[key] for key in _QUANTISATION if keys.get(key)), None)
    if config.weight_format is None:
        method = given.get("quant_method") if isinstance(given, dict) else None
        return Derived(f"{method}" if method else "none", "quantization_config")
    forms = "; ".join(_form_in_words(form) for form in config.weight_format.forms)
    n_ignored = len(config.weight_format.ignored)
    kept = f", except {n_ignored} names of modules" if n_ignored else ""
    return Derived(f"{forms}{kept}", "quantization_config")


_QUANTISATION = ("quantization_config", "compression_config")


def _form_in_words(form: MatrixFormat) -> str:
    n_out, n_in = form.block
    inputs = "all inputs" if n_in is None else f"{n_in} inputs"
    outputs = "all outputs" if n_out is None else f"{n_out} outputs"
    zeros = " with zero points" if form.has_zeros else ""
    return f"{form.layout}, {form.bits} bits, a scale{zeros} for {outputs} and {inputs}"
