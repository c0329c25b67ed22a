"""The models of Table 1, and the machines on which the paper runs them (section 6.1).

The models are GPT-3 in four sizes, in fp16, on A100s with 40 GB. A stage has `tp_size` GPUs of one
host.
"""

from dataclasses import dataclass

BYTES = 2
"""Bytes of a weight, and of an element of keys and values, in fp16."""

HEAD_DIM = 128
"""Number of elements of an attention head of GPT-3. The paper does not mention this size."""

GPU_MEMORY_BYTES = 40e9
MEMORY_PART = 0.9
"""Share of a GPU's memory that is used for weights, keys and values. The paper does not mention
this share."""


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model, and its division into stages and GPUs."""

    name: str
    n_layers: int
    hidden_size: int
    n_stages: int
    tp_size: int

    @property
    def n_gpus(self) -> int:
        """Number of GPUs of all stages."""
        return self.n_stages * self.tp_size

    @property
    def n_layer_weights(self) -> int:
        """Number of weights of a layer: 4 H^2 of attention and 8 H^2 of the MLP."""
        return 12 * self.hidden_size**2

    @property
    def slot_bytes(self) -> int:
        """Number of bytes of the keys and values of one token in all layers."""
        return 2 * BYTES * self.hidden_size * self.n_layers

    @property
    def n_slots(self) -> int:
        """Number of K/V slots (one per token) that fit into memory beside the weights."""
        n_bytes = MEMORY_PART * GPU_MEMORY_BYTES * self.n_gpus
        return int((n_bytes - BYTES * self.n_layer_weights * self.n_layers) / self.slot_bytes)


MODELS = {
    model.name: model
    for model in (
        PaperModel("13B", n_layers=40, hidden_size=5120, n_stages=1, tp_size=1),
        PaperModel("101B", n_layers=80, hidden_size=10240, n_stages=1, tp_size=8),
        PaperModel("175B", n_layers=96, hidden_size=12288, n_stages=2, tp_size=8),
        PaperModel("341B", n_layers=120, hidden_size=15360, n_stages=4, tp_size=8),
    )
}
