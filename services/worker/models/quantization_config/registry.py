"""Reads `quantization_config`, which says how a checkpoint is quantised; raises UnsupportedModel.

The known methods are GPTQ, AWQ, compressed-tensors and FP8. As everywhere in `config.json`, an
unknown key is refused unless the key is switched off. Settings of activations are ignored, and
activations are computed in the model's element type: a checkpoint permits rounded activations, but
does not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.worker.models.config import MAX_SIZE, JsonObject, UnsupportedModel
from services.worker.models.weight_format import (
    MatrixFormat,
    WeightFormat,
    check_targets,
)

KEYS = frozenset(("quantization_config", "compression_config"))
"""Keys of `config.json` that hold the quantisation settings; the second is an older name."""

_MAX_NAME = 300  # characters of a module's name or expression
_MAX_NAMES = 20_000  # some files list every layer's norms


class _Config(BaseModel):
    """A part of the settings: fields for the known keys, and `ignored` keys that change no
    result."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ignored: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def read(cls, given: JsonObject) -> Self:
        """Returns the settings of `given`, without keys that are ignored or switched off."""
        kept = {
            key: value
            for key, value in given.items()
            if key not in cls.ignored and value is not None and (value or key in cls.model_fields)
        }
        return cls.model_validate(kept)


class _Gptq(_Config):
    """The settings of GPTQ, as AutoGPTQ, GPTQModel and Optimum write them."""

    ignored = frozenset((
        "act_group_aware", "backend", "batch_size", "block_name_to_quantize",
        "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "disable_exllama",
        "exllama_config", "inject_fused_attention", "inject_fused_mlp", "lm_head",
        "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize", "mse", "pad_token_id", "static_groups", "tokenizer",
        "true_sequential", "use_cuda_fp16", "use_exllama",
    ))  # fmt: skip

    quant_method: Literal["gptq"]
    method: Literal["gptq"] = "gptq"
    bits: Literal[4, 8]
    group_size: int = Field(default=128, ge=-1, le=MAX_SIZE)
    sym: bool = True
    desc_act: bool = False
    format: Literal["gptq", "gptq_v2"] | None = None
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None
    pack_dtype: Literal["int32"] = "int32"
    dynamic: dict[str, Any] = {}

    def weight_format(self) -> WeightFormat:
        """Returns the format of the weights that these settings describe."""
        if any(not name.startswith("-:") for name in self.dynamic):
            raise UnsupportedModel(
                "config.json: quantization_config.dynamic gives modules bits of their own"
            )
        version = self.checkpoint_format or self.format or "gptq"
        form = MatrixFormat(
            layout="gptq",
            bits=self.bits,
            block=(1, _group(self.group_size)),
            has_zeros=True,
            # The first version stores zero points minus one.
            zero_offset=1 if version == "gptq" else 0,
            needs_order=self.desc_act,
        )
        ignored = tuple(f"re:{name.removeprefix('-:')}" for name in self.dynamic)
        return WeightFormat((form,), ignored)


class _Awq(_Config):
    """The settings of AWQ, as AutoAWQ writes them for the version "gemm"."""

    ignored = frozenset((
        "backend", "desc_act", "exllama_config", "fuse_max_seq_len", "lm_head", "meta",
        "modules_to_fuse", "sym", "true_sequential",
    ))  # fmt: skip

    quant_method: Literal["awq"]
    bits: Literal[4] = 4
    group_size: int = Field(default=128, ge=-1, le=MAX_SIZE)
    zero_point: bool = True
    version: Literal["gemm", "GEMM"] = "gemm"
    format: Literal["gemm"] = "gemm"
    modules_to_not_convert: tuple[str, ...] = ()

    @classmethod
    def read(cls, given: JsonObject) -> Self:
        aliases = {"w_bit": "bits", "q_group_size": "group_size"}
        return super().read({aliases.get(key, key): value for key, value in given.items()})

    def weight_format(self) -> WeightFormat:
        """Returns the format of the weights that these settings describe.

        Zero points are stored even where every zero point is the middle of the range.
        """
        form = MatrixFormat(
            layout="awq", bits=self.bits, block=(1, _group(self.group_size)), has_zeros=True
        )
        return WeightFormat((form,), self.modules_to_not_convert)


class _Fp8(_Config):
    """The settings of FP8: with scales of blocks (DeepSeek, Qwen) or with one scale (AutoFP8)."""

    # Settings of activations, and how scales were rounded before storing in float32.
    ignored = frozenset(("activation_scheme", "dequantize"))

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    weight_block_size: tuple[int, int] | None = None
    modules_to_not_convert: tuple[str, ...] = ()
    ignored_layers: tuple[str, ...] = ()
    scale_fmt: Literal["float", "ue8m0"] = "float"

    def weight_format(self) -> WeightFormat:
        """Returns the format of the weights that these settings describe."""
        block = self.weight_block_size
        if block is not None and min(block) < 1:
            raise UnsupportedModel(
                f"config.json: quantization_config.weight_block_size {list(block)} is no size"
            )
        form = MatrixFormat(
            layout="scaled",
            bits=8,
            block=block or (None, None),
            scale_name="weight_scale" if block is None else "weight_scale_inv",
        )
        return WeightFormat((form,), (*self.modules_to_not_convert, *self.ignored_layers))


_PACKED, _INT, _FLOAT, _NAIVE = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
)  # fmt: skip
_Format = Literal["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"]


class _WeightArgs(_Config):
    """How the weights of a group of compressed-tensors are quantised."""

    ignored = frozenset(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"))

    num_bits: Literal[4, 8] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block"] | None = None
    group_size: int | None = Field(default=None, ge=-1, le=MAX_SIZE)
    block_structure: tuple[int, int] | None = None
    dynamic: Literal[False] = False
    # With "group", "dynamic" or true, the inputs of a group are not neighbours in the file.
    actorder: Literal["group", "dynamic", "weight", "static"] | bool | None = None

    def block(self) -> tuple[int | None, int | None]:
        """Returns the numbers of outputs and of inputs that share a scale; None: all of them share
        it."""
        strategy = self.strategy
        if strategy is None:
            strategy = "tensor" if self.group_size is None else "group"
            strategy = "channel" if self.group_size == -1 else strategy
        if strategy == "group":
            if not self.group_size or self.group_size < 1:
                raise ValueError("strategy group needs a group_size")
            return 1, self.group_size
        if strategy == "block":
            if self.block_structure is None or min(self.block_structure) < 1:
                raise ValueError("strategy block needs a block_structure of two sizes")
            return self.block_structure
        return (1, None) if strategy == "channel" else (None, None)


class _Group(_Config):
    """A group of modules that compressed-tensors quantises with equal settings."""

    # Settings of activations: see the docstring of this file.
    ignored = frozenset(("input_activations",))

    targets: tuple[str, ...]
    weights: dict[str, Any]
    format: _Format | None = None


class _CompressedTensors(_Config):
    """The settings of compressed-tensors, as LLM Compressor writes them."""

    ignored = frozenset(("global_compression_ratio", "version"))

    quant_method: Literal["compressed-tensors"]
    format: _Format | Literal["mixed-precision"]
    config_groups: dict[str, dict[str, Any]] = Field(min_length=1)
    ignore: tuple[str, ...] = ()
    quantization_status: Literal["compressed"] = "compressed"
    sparsity_config: dict[str, Any] = {}

    def weight_format(self) -> WeightFormat:
        """Returns the format of the weights that these settings describe."""
        if self.sparsity_config.get("format", "dense") != "dense":
            raise UnsupportedModel(
                "config.json: quantization_config.sparsity_config.format "
                f"{str(self.sparsity_config['format'])[:80]!r} is not supported, only 'dense' is"
            )
        forms = tuple(self._form(group) for group in self.config_groups.values())
        return WeightFormat(forms, self.ignore)

    def _form(self, given: JsonObject) -> MatrixFormat:
        group = _Group.read(given)
        weights = _WeightArgs.read(group.weights)
        stored = group.format or self.format
        kinds: Mapping[str, tuple[str, ...]] = {
            _PACKED: ("int",), _INT: ("int",), _FLOAT: ("float",), _NAIVE: ("int", "float"),
        }  # fmt: skip
        if weights.type not in kinds.get(stored, ()):
            raise UnsupportedModel(
                f"config.json: quantization_config.format {stored!r} of {weights.type} weights is "
                "not supported"
            )
        if weights.type == "float" and weights.num_bits != 8:
            raise UnsupportedModel(
                "config.json: quantization_config: weights.num_bits of floats is "
                f"{weights.num_bits}, and only 8 is supported"
            )
        if stored == _PACKED and not weights.symmetric and weights.block() == (None, None):
            raise ValueError("packed weights of one zero point")
        return MatrixFormat(
            layout="packed" if stored == _PACKED else "scaled",
            bits=weights.num_bits,
            block=weights.block(),
            has_zeros=not weights.symmetric,
            needs_order=weights.actorder in ("group", "dynamic", True),
            targets=group.targets,
        )


_METHODS: Mapping[str, type[_Gptq] | type[_Awq] | type[_Fp8] | type[_CompressedTensors]] = {
    "gptq": _Gptq,
    "awq": _Awq,
    "fp8": _Fp8,
    "compressed-tensors": _CompressedTensors,
}


def read_weight_format(
    config: JsonObject, summary: Callable[[ValidationError], str], own: Set[str] = frozenset()
) -> WeightFormat | None:
    """Returns the format of the stored matrices; None for a checkpoint that is not quantised.

    Returns None also for the methods in `own`, whose settings the family reads itself. `summary`
    turns a validation error into text. Raises UnsupportedModel for a method that is not known.
    """
    given = next((config[key] for key in sorted(KEYS, reverse=True) if config.get(key)), None)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise UnsupportedModel("config.json: quantization_config is no object")
    method = given.get("quant_method")
    if isinstance(method, str) and method in own and given is config.get("quantization_config"):
        return None
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModel(
            f"config.json: quantization_config.quant_method {repr(method)[:80]} is not one of "
            f"{[*_METHODS]}"
        )
    try:
        read = _METHODS[method].read(given).weight_format()
        _check_names(read)
    except ValidationError as error:
        raise UnsupportedModel(f"config.json: quantization_config: {summary(error)}") from error
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise UnsupportedModel(f"config.json: quantization_config: {error}") from error
    return read


def _check_names(read: WeightFormat) -> None:
    """Raises ValueError for too many or too long module names, and for invalid regular
    expressions."""
    names = [*read.ignored, *(name for form in read.forms for name in form.targets)]
    if len(names) > _MAX_NAMES or any(len(name) > _MAX_NAME for name in names):
        raise ValueError(f"more than {_MAX_NAMES} names of modules, or {_MAX_NAME} characters")
    check_targets(names)


def _group(size: int) -> int | None:
    """Returns the number of inputs that share a scale; None (-1 in the file) if all inputs share
    it."""
    if size == 0:
        raise ValueError("group_size is 0")
    return None if size < 0 else size
