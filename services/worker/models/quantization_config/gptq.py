"""The settings of GPTQ, as AutoGPTQ, GPTQModel, Optimum and AutoRound write them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.worker.models.config import MAX_SIZE
from services.worker.models.quantization_config.settings import (
    Method,
    Names,
    Settings,
    inputs_of_group,
)
from services.worker.models.weight_format import EVERY_MATRIX, MatrixFormat, WeightFormat

_NOT, _ALSO = "-:", "+:"
"""Prefixes of regular expressions in `dynamic`. `-:` marks modules that are not quantised, and `+:`
marks modules with settings of their own. `+:` may be left out."""

QUANTISING = frozenset((
    "act_group_aware", "auto_forward_data_parallel", "backend", "batch_size",
    "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "device",
    "disable_exllama", "exllama_config", "failsafe", "failsafe_strategy", "failsafe_with_rtn",
    "fallback", "gc_mode", "gptaq", "gptaq_alpha", "gptaq_memory_device", "hessian",
    "inject_fused_attention", "inject_fused_mlp", "max_input_length", "meta",
    "mock_quantization", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "moe", "mse", "offload_to_disk",
    "offload_to_disk_path", "pack_impl", "pad_token_id", "parallel_packing", "pre_filters",
    "process", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16",
    "use_exllama", "v2", "v2_alpha", "v2_memory_device", "vram_strategy",
    "wait_for_layer_completion", "wait_for_submodule_finalizers", "weight_only",
))  # fmt: skip
"""Keys that do not affect how the weights are read: how they were quantised, and settings for other
programs."""

AUTO_ROUND = frozenset((
    "act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym", "amp",
    "autoround_version", "data_type", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "enable_quanted_input", "gradient_accumulate_steps", "iters", "low_cpu_mem_usage",
    "low_gpu_mem_usage", "lr", "minmax_lr", "model_free", "nsamples", "quant_block_list",
    "scale_dtype", "seqlen", "static_attention_dtype", "static_attention_granularity",
    "static_kv_dtype", "static_kv_granularity", "super_bits", "super_group_size",
    "supported_types", "to_quant_block_names",
))  # fmt: skip
"""Keys that AutoRound also writes into the settings of GPTQ and AWQ."""

# The files say which modules are quantised, so lists of quantised modules are not needed.
LISTS = frozenset(("block_name_to_quantize", "lm_head", "modules_in_block_to_quantize"))


class _Own(Settings):
    """The settings of the modules that one regular expression of `dynamic` matches."""

    ignored = QUANTISING

    bits: Literal[2, 3, 4, 8] | None = None
    group_size: int | None = Field(default=None, ge=-1, le=MAX_SIZE)
    sym: bool | None = None
    desc_act: bool | None = None


class Gptq(Method):
    """The settings of GPTQ."""

    ignored = QUANTISING | AUTO_ROUND | LISTS

    quant_method: Literal["gptq"]
    method: Literal["gptq"] = "gptq"
    bits: Literal[2, 3, 4, 8]
    group_size: int = Field(default=128, ge=-1, le=MAX_SIZE)
    # Where a file does not say, the tensors of the file do.
    sym: bool | None = None
    desc_act: bool | None = None
    is_marlin_format: Literal[False] = False
    format: Literal["gptq", "gptq_v2"] | None = None
    checkpoint_format: Literal["gptq", "gptq_v2"] | None = None
    pack_dtype: Literal["int32"] = "int32"
    dynamic: dict[str, dict[str, Any]] = Field(default_factory=dict)
    modules_to_not_convert: Names = ()

    def weight_format(self) -> WeightFormat:
        own = {name: _Own.read(said) for name, said in self.dynamic.items() if name[:2] != _NOT}
        forms = (self._form(f"re:{name.removeprefix(_ALSO)}", said) for name, said in own.items())
        names = (f"re:{name[2:]}" for name in self.dynamic if name[:2] == _NOT)
        return WeightFormat(
            (*forms, self._form(EVERY_MATRIX, _Own())), (*names, *self.modules_to_not_convert)
        )

    def _form(self, target: str, own: _Own) -> MatrixFormat:
        """Returns the format of the modules that `target` names. Settings in `own` override the
        common settings."""
        version = self.checkpoint_format or self.format or "gptq"
        size = self.group_size if own.group_size is None else own.group_size
        desc_act = self.desc_act if own.desc_act is None else own.desc_act
        return MatrixFormat(
            layout="gptq",
            bits=own.bits or self.bits,
            block=(1, inputs_of_group(size)),
            has_zeros=not (self.sym if own.sym is None else own.sym),
            # The first version stores zero points minus one.
            zero_offset=1 if version == "gptq" else 0,
            order="required" if desc_act else "stored",
            targets=(target,),
        )
