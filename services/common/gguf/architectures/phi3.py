"""Phi-3 and Phi-4. The matrices of queries, keys and values are stored as one matrix, and so are
the gate and up matrices."""

from __future__ import annotations

from services.common.gguf.architecture import Architecture, Config, Metadata
from services.common.gguf.architectures.names import OUTSIDE, PRE_NORMS


def _phi3(said: Metadata, config: Config) -> Config:
    """Returns the configuration keys for the original context, if the file states it, and for the
    sliding window. A window of 0 in the file means no window."""
    original = said.integer("rope.scaling.original_context_length")
    window = said.integer("attention.sliding_window")
    return {
        **({} if original is None else {"original_max_position_embeddings": original}),
        "sliding_window": window or None,
    }


PHI3 = Architecture(
    family="Phi3ForCausalLM",
    tensors={
        **OUTSIDE,
        **PRE_NORMS,
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    others=frozenset(("attention.sliding_window",)),
    more=_phi3,
    is_partial=True,
)
