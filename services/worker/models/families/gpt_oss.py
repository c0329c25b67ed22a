"""gpt-oss: experts in every layer, and attention with sinks (OpenAI, 2025).

Every second layer has a window. The outputs of an expert's first matrix alternate between a gate
and the value that the gate multiplies. Published checkpoints have experts in MXFP4, which stay
quantised on a CPU and are dequantised when they are read on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from kernels import AttentionForm
from kernels.forms.experts import ExpertForm
from kernels.packing.experts import pack_experts
from kernels.packing.linear import pack
from kernels.steps import ExpertMatrices
from kernels.weights.linear import Clamp
from services.worker.models.config import (
    Count,
    JsonObject,
    PositiveFloat,
    PositiveInt,
    UnsupportedModel,
    read_windows,
)
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import MLP, Attention
from services.worker.models.mixture import ExpertMixture
from services.worker.models.mixture_config import MixtureConfig
from services.worker.models.quantised.mxfp4 import BLOCK
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.tensor_parallel import HeadShare, even_share
from services.worker.models.weights import Part, Shard, TensorSource
from services.worker.models.window_config import LayerWindows

# Defaults of `GptOssConfig` for missing keys.
_DEFAULTS: JsonObject = {"head_dim": 64, "num_key_value_heads": 8}
_DEFAULT_WINDOW = 128
_DEFAULT_ROPE: JsonObject = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

# The last key is for other programs that load the file.
_QUANTIZATION_KEYS = frozenset(("quant_method", "modules_to_not_convert", "dequantize"))
_MAX_PATTERNS, _MAX_PATTERN = 1000, 300  # number of patterns, and characters of a pattern


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(LayerWindows, MixtureConfig):
    """Counterpart of Hugging Face's `GptOssConfig`."""

    architecture = "GptOssForCausalLM"
    read_keys = RotaryConfig.read_keys | {
        "sliding_window", "layer_types", "quantization_config", "experts_per_token",
    }  # fmt: skip
    # The first two matter to training only; the last repeats a rotary setting.
    ignored_keys = frozenset(
        ("output_router_logits", "router_aux_loss_coef", "initial_context_length")
    )
    own_quantizations = frozenset(("mxfp4",))
    default_rope_theta = 150_000.0
    experts_key = "num_local_experts"

    max_position_embeddings: PositiveInt = 131_072
    rms_norm_eps: PositiveFloat = 1e-5
    attention_bias: bool = True
    n_experts: Count = field(default=128, metadata={"alias": "num_local_experts"})
    n_chosen: PositiveInt = field(default=4, metadata={"alias": "num_experts_per_tok"})
    swiglu_alpha: PositiveFloat = 1.702
    swiglu_limit: PositiveFloat = 7.0
    packed_layers: tuple[int, ...] = ()  # layers whose experts are stored in MXFP4

    def check(self) -> None:
        super().check()
        for key in ("hidden_size", "intermediate_size"):
            if self.packed_layers and getattr(self, key) % BLOCK:
                raise ValueError(
                    f"{key} ({getattr(self, key)}) is not a multiple of {BLOCK}, the numbers in a "
                    "block of MXFP4"
                )

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        # Files repeat the number of chosen experts under the key of OpenAI's own program.
        again = config.get("experts_per_token")
        if again not in (None, config.get("num_experts_per_tok", again)):
            raise UnsupportedModel(
                f"config.json: experts_per_token ({again}) is not num_experts_per_tok"
            )
        n_layers = config.get("num_hidden_layers") or 0
        windows = read_windows(
            config,
            window=config.get("sliding_window", _DEFAULT_WINDOW),
            default=[i % 2 == 0 for i in range(n_layers)],
        )
        if config.get("quantization"):
            raise UnsupportedModel(
                "config.json: quantization: MLX's files of gpt-oss are not supported; serve "
                "OpenAI's own files of this model, which are in MXFP4, too, or its GGUF files"
            )
        packed_layers = _read_packed_layers(config.get("quantization_config"), n_layers)
        rope = config.get("rope_parameters")
        if not (rope or config.get("rope_scaling")):
            rope = _DEFAULT_ROPE
        fields = {
            **super().read({**_DEFAULTS, **config, "rope_parameters": rope}),
            "windows": windows,
            "packed_layers": packed_layers,
        }
        if packed_layers and not (config.get("dtype") or config.get("torch_dtype")):
            fields["checkpoint_dtype"] = "bfloat16"  # missing in OpenAI's files
        return fields


def _read_packed_layers(quantization: Any, n_layers: int) -> tuple[int, ...]:
    """Returns the indices of the layers whose experts are stored in MXFP4. Raises UnsupportedModel
    for other quantisation."""
    if not quantization:
        return ()
    method = quantization.get("quant_method")
    if method != "mxfp4":
        raise UnsupportedModel(
            f"config.json: quantization_config.quant_method {repr(method)[:80]} is not supported, "
            "only 'mxfp4' is"
        )
    unknown = {key for key, value in quantization.items() if value} - _QUANTIZATION_KEYS
    if unknown:
        raise UnsupportedModel(
            f"config.json: quantization_config: options {sorted(unknown)} are not supported"
        )
    plain = tuple(quantization.get("modules_to_not_convert") or ())
    if len(plain) > _MAX_PATTERNS or any(len(pattern) > _MAX_PATTERN for pattern in plain):
        raise UnsupportedModel(
            "config.json: quantization_config.modules_to_not_convert has more than "
            f"{_MAX_PATTERNS} entries, or one of more than {_MAX_PATTERN} characters"
        )
    return tuple(i for i in range(n_layers) if not _names(plain, f"model.layers.{i}.mlp.experts"))


def _names(patterns: Sequence[str], module: str) -> bool:
    """Returns whether a pattern matches the name `module` or the name of one of its parents, or is
    the end of the name.

    Patterns are those of a shell, such as `model.layers.*.mlp`. In `transformers` they are regular
    expressions.
    """
    return any(
        fnmatchcase(module, pattern)
        or fnmatchcase(module, f"{pattern}.*")
        or module.endswith(pattern)
        for pattern in patterns
    )


class GptOssStage(RotaryStage):
    """One stage of a gpt-oss model."""

    config_type = GptOssConfig
    config: GptOssConfig

    def read_scale(self, source: TensorSource, name: str, size: int) -> Tensor:
        return (
            super().read_scale(source, name, size).float()
        )  # kept in float32: the scaled result is rounded

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        n_heads = self.config.n_heads
        heads = HeadShare.of(self.config, source.tp_rank, source.tp_size)
        sinks = source.tensor(f"{prefix}.sinks", n_heads, shard=Shard(0, heads.q))
        return Attention.read(
            source,
            prefix,
            self.config,
            form=AttentionForm(window=self.config.layer_windows[index]),
            qkv_bias=self.config.attention_bias,
            output_bias=self.config.attention_bias,
            sinks=sinks.float(),
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        n_experts, hidden_size = self.config.n_experts, self.config.hidden_size
        router = source.tensor(f"{prefix}.router.weight", n_experts, hidden_size)
        router_bias = source.tensor(f"{prefix}.router.bias", n_experts)
        experts = _Experts(self.config, source, f"{prefix}.experts", index)
        return ExpertMixture(
            pack(router),
            experts.packed(),
            self.config.n_chosen,
            normalises=True,
            router_bias=router_bias,
        )


class _Experts:
    """Reads this rank's share of every expert of a layer: a range of the expert's inner
    elements."""

    def __init__(self, config: GptOssConfig, source: TensorSource, prefix: str, index: int) -> None:
        self._config = config
        self._source = source
        self._prefix = prefix
        self._is_packed = index in config.packed_layers
        size = config.intermediate_size
        self._share = even_share(size, source.tp_rank, source.tp_size, what=f"inside of {prefix}")
        # Gates have even indices; the value of each gate has the next odd index.
        self._pairs = range(2 * self._share.start, 2 * self._share.stop)

    def packed(self) -> ExpertMatrices:
        """Returns the experts in the form that this device computes fastest."""
        n, hidden_size = self._config.n_experts, self._config.hidden_size
        size = self._config.intermediate_size
        gate_up, down = f"{self._prefix}.gate_up_proj", f"{self._prefix}.down_proj"
        of_pairs, of_share = Shard(1, self._pairs), Shard(2, self._share)
        if self._is_packed:
            return self._source.stacked_experts(
                Part(gate_up, (n, 2 * size, hidden_size), of_pairs, is_mxfp4=True),
                Part(down, (n, hidden_size, size), of_share, is_mxfp4=True),
                _gates_first(torch.arange(len(self._pairs))[None])[0],
                self._form(),
            )
        # These matrices are stored with inputs first.
        first = self._source.tensor(gate_up, n, hidden_size, 2 * size, shard=Shard(2, self._pairs))
        second = self._source.tensor(down, n, size, hidden_size, shard=Shard(1, self._share))
        return pack_experts(
            _gates_first(first.transpose(1, 2)),
            second.transpose(1, 2).contiguous(),
            self._form(),
        )

    def _form(self) -> ExpertForm:
        """Returns the biases and the gate of the experts.

        Only rank 0 has the bias of the second matrix, so that the sum over the ranks includes this
        bias once.
        """
        n, size = self._config.n_experts, self._config.intermediate_size
        gate_up = self._source.tensor(
            f"{self._prefix}.gate_up_proj_bias", n, 2 * size, shard=Shard(1, self._pairs)
        )
        down = None
        if self._source.tp_rank == 0:
            name = f"{self._prefix}.down_proj_bias"
            down = self._source.tensor(name, n, self._config.hidden_size)
        clamp = Clamp(self._config.swiglu_alpha, self._config.swiglu_limit)
        return ExpertForm(_gates_first(gate_up), down, clamp)


def _gates_first(x: Tensor) -> Tensor:
    """Reorders the rows of `x` [n_experts, 2 * size, ...]: the rows of even index first, then the
    rows of odd index."""
    return torch.cat((x[:, ::2], x[:, 1::2]), 1)
