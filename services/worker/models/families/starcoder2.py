"""StarCoder2: Llama's attention with biases, layer norms, and an MLP without gates (Lozhkov et al.,
2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernels import AttentionForm
from services.worker.models.config import JsonObject, PositiveFloat, PositiveInt, require
from services.worker.models.decoder import RotaryStage
from services.worker.models.decoder_layers import (
    MLP,
    Activation,
    Attention,
    LayerNorm,
    Norm,
    PlainMLP,
)
from services.worker.models.layers import ColumnParallelLinear, RowParallelLinear
from services.worker.models.rotary_config import RotaryConfig
from services.worker.models.weights import TensorSource
from services.worker.models.window_config import EqualWindowsConfig


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(EqualWindowsConfig):
    """Counterpart of Hugging Face's `Starcoder2Config`."""

    architecture = "Starcoder2ForCausalLM"
    default_eos_token_ids = (50256,)
    default_n_kv_heads = 2
    read_keys = RotaryConfig.read_keys | {"mlp_type", "norm_type", "scale_attn_weights"}
    # `norm_epsilon` is used, not `layer_norm_epsilon`, and `hidden_act`, not GPT-BigCode's
    # `activation_function`, as in transformers; a softmax is always in float32.
    ignored_keys = frozenset((
        "activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
        "embedding_dropout", "residual_dropout", "layer_norm_epsilon",
    ))  # fmt: skip
    hidden_acts = ("gelu_pytorch_tanh", "gelu", "gelu_new", "relu")

    # The eps of layer norms, in spite of the field's name.
    rms_norm_eps: PositiveFloat = field(default=1e-5, metadata={"alias": "norm_epsilon"})
    activation: Activation = field(default="gelu_pytorch_tanh", metadata={"alias": "hidden_act"})
    use_bias: bool = True
    window: PositiveInt | None = field(default=None, metadata={"alias": "sliding_window"})
    tie_word_embeddings: bool = True

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(
            config, mlp_type=("default",), norm_type=("layer_norm",), scale_attn_weights=(True,)
        )
        return super().read(config)


class Starcoder2Stage(RotaryStage):
    """One stage of a StarCoder2 model."""

    config_type = Starcoder2Config
    config: Starcoder2Config

    def read_norm(self, source: TensorSource, name: str, size: int) -> Norm:
        eps = self.config.rms_norm_eps
        return LayerNorm.read(source, name, size=size, eps=eps)

    def read_attention(self, source: TensorSource, prefix: str, index: int) -> Attention:
        return Attention.read(
            source,
            prefix,
            self.config,
            form=AttentionForm(window=self.config.layer_windows[index]),
            qkv_bias=self.config.use_bias,
            output_bias=self.config.use_bias,
        )

    def read_mlp(self, source: TensorSource, prefix: str, index: int) -> MLP:
        size, hidden_size = self.config.intermediate_size, self.config.hidden_size
        has_bias = self.config.use_bias
        up = ColumnParallelLinear.read(
            source, [f"{prefix}.c_fc"], n_in=hidden_size, n_out=(size,), has_bias=has_bias
        )
        down = RowParallelLinear.read(
            source, f"{prefix}.c_proj", n_in=size, n_out=hidden_size, has_bias=has_bias
        )
        return PlainMLP(up, down, self.config.activation)
