"""Lists the methods of quantisation, and finds the method of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from pydantic import ValidationError

from services.worker.models.config import JsonObject, UnsupportedModel
from services.worker.models.quantization_config.auto_round import AutoRound
from services.worker.models.quantization_config.awq import Awq
from services.worker.models.quantization_config.bitsandbytes import BitsAndBytes
from services.worker.models.quantization_config.compressed_tensors import CompressedTensors
from services.worker.models.quantization_config.fp8 import FbgemmFp8, Fp8
from services.worker.models.quantization_config.gptq import Gptq
from services.worker.models.quantization_config.mlx import Mlx
from services.worker.models.quantization_config.modelopt import ModelOpt
from services.worker.models.quantization_config.settings import Method
from services.worker.models.weight_format import WeightFormat

KEYS = ("quantization", "quantization_config", "compression_config")
"""Keys of `config.json` under which quantisation settings may be. The first key that exists is
used. The first key in the list is MLX's, and the last is an older name."""

OTHER_FILES: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files that may hold the quantisation settings if `config.json` has none, and the method of each
file."""

METHODS: Mapping[str, type[Method]] = {
    "gptq": Gptq,
    "awq": Awq,
    "fp8": Fp8,
    "fbgemm_fp8": FbgemmFp8,
    "compressed-tensors": CompressedTensors,
    "auto-round": AutoRound,
    "intel/auto-round": AutoRound,
    "bitsandbytes": BitsAndBytes,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "modelopt_mixed": ModelOpt,
}
"""The class of each method, by the value of `quant_method`. Settings of MLX have no such value."""

_MAX_NAME = 300  # characters of a module's name or expression
_MAX_NAMES = 20_000  # some files list every layer's norms


def read_weight_format(
    config: JsonObject, summary: Callable[[ValidationError], str], own: Set[str] = frozenset()
) -> WeightFormat | None:
    """Returns the format of the stored matrices, or None for a checkpoint that is not quantised.

    Returns None also for the methods in `own`, whose settings the family reads itself. `summary`
    turns a validation error into text. Raises UnsupportedModel for a method or settings that are
    not supported.
    """
    given = next((config[key] for key in KEYS if config.get(key)), None)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise UnsupportedModel("config.json: quantization_config is no object")
    method = given.get("quant_method")
    if isinstance(method, str) and method in own and given is config.get("quantization_config"):
        return None
    try:
        read = _method(method, given).read(given).weight_format()
        _check_names(read)
    except ValidationError as error:
        raise UnsupportedModel(f"config.json: quantization_config: {summary(error)}") from error
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise UnsupportedModel(f"config.json: quantization_config: {error}") from error
    return read


def _method(name: object, given: JsonObject) -> type[Method]:
    """Returns the class for the quantisation settings `given`. `name` is the value of their key
    `quant_method`. Raises UnsupportedModel for an unknown method."""
    if name is None and {"group_size", "bits"} <= given.keys():
        return Mlx
    if name is None and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        return METHODS["bitsandbytes"]
    if not isinstance(name, str) or name not in METHODS:
        raise UnsupportedModel(
            f"config.json: quantization_config.quant_method {repr(name)[:80]} is not one of "
            f"{[*METHODS]}; serve unquantised files of this model, or its GGUF, GPTQ or AWQ files"
        )
    return METHODS[name]


def _check_names(read: WeightFormat) -> None:
    """Raises ValueError for too many or too long module names, and for regular expressions that are
    invalid or not supported."""
    names = [*read.ignored, *(name for form in read.forms for name in form.targets)]
    if len(names) > _MAX_NAMES or any(len(name) > _MAX_NAME for name in names):
        raise ValueError(f"more than {_MAX_NAMES} names of modules, or {_MAX_NAME} characters")
    read.check()
