"""The time of an iteration on the paper's machines, as a model with few parameters.

A layer reads its weights or multiplies, whichever takes longer. The launches of kernels and the
all-reduces over GPUs take a time that does not depend on the batch. Attention takes a time for each
request, reads the keys and values of decodes, and multiplies for each pair of tokens of a prompt in
each head. The time of a stage of n layers is a roofline (Williams et al., 2009) with overheads:

    n (layer_s + max(weights / bandwidth, tokens * weights / products) + requests * request_s
       + slots * slot_bytes / bandwidth + pairs * heads * pair_s)

An engine that sends control messages from GPU to GPU waits `sync_s` for them in an iteration of
several stages. All stages wait at the same time, so the model adds this time to the first stage.
"""

from dataclasses import dataclass

from benchmarks.paper.models import BYTES, HEAD_DIM, PaperModel
from simulator.costs import IterationWork


@dataclass(frozen=True, slots=True)
class Gpu:
    """The parameters of one engine on one kind of GPU."""

    layer_s: float
    """Seconds per layer that do not depend on the batch."""
    bandwidth: float
    """Bytes of weights, keys and values that are read per second."""
    products: float
    """Multiply-adds of matrix products per second."""
    request_s: float
    """Seconds of attention per request and layer."""
    pair_s: float
    """Seconds per pair of a prompt's tokens that attend to each other, in each head of a layer."""
    sync_s: float = 0.0
    """Seconds per iteration in which the stages wait for control messages, if there are several
    stages."""


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """The costs of a model on its GPUs, in the form that the simulator uses."""

    model: PaperModel
    gpu: Gpu
    plan_s: float = 0.0
    hop_s: float = 0.0
    result_s: float = 0.0
    request_s: float = 0.0

    @property
    def n_stages(self) -> int:
        return self.model.n_stages

    def stage_s(self, stage_index: int, work: IterationWork) -> float:
        """Returns the seconds for which an iteration occupies a stage."""
        model, gpu = self.model, self.gpu
        weights = model.n_layer_weights / model.tp_size
        reading_s = BYTES * weights / gpu.bandwidth
        multiplying_s = work.n_tokens * weights / gpu.products
        slot_bytes = model.slot_bytes / model.n_layers / model.tp_size
        n_heads = model.hidden_size / HEAD_DIM / model.tp_size
        attention_s = work.n_spans * gpu.request_s
        attention_s += work.n_decode_slots * slot_bytes / gpu.bandwidth
        attention_s += work.n_prompt_pairs * n_heads * gpu.pair_s
        layer_s = gpu.layer_s + max(reading_s, multiplying_s) + attention_s
        waits = stage_index == 0 and model.n_stages > 1
        return model.n_layers / model.n_stages * layer_s + gpu.sync_s * waits

    def iteration_s(self, work: IterationWork) -> float:
        """Returns the seconds of an iteration through all stages, one after the other."""
        return sum(self.stage_s(index, work) for index in range(self.n_stages))
