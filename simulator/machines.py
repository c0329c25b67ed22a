"""Machines with known costs, on which policies and settings are compared.

`four H100` stands for four GPUs that serve a model with the shape of Llama 3.1 70B in bfloat16:
70.6e9 weights, 80 layers, 64 heads of 128 elements, 8 of them with keys and values. A GPU is an
H100 SXM: 989e12 operations and 3.35e12 bytes a second, and 80e9 bytes of memory. The machine
assumes that a GPU reaches half of these operations and four fifths of this bandwidth, and that nine
tenths of its memory hold weights, keys and values. An iteration also takes 1 ms for launches, and
30 us in each layer for two sums over the GPUs. Products of up to 128 tokens take no longer than the
reading of the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from simulator.costs import IterationWork

N_GPUS = 4
N_WEIGHTS, WEIGHT_BYTES = 70.6e9, 2
N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM = 80, 64, 8, 128
OPERATIONS_PER_S, BYTES_PER_S = N_GPUS * 989e12 / 2, N_GPUS * 3.35e12 * 0.8
MEMORY_BYTES = N_GPUS * 80e9 * 0.9
LAUNCHES_S = 1e-3 + N_LAYERS * 2 * 15e-6
SLOT_BYTES = 2 * WEIGHT_BYTES * N_LAYERS * N_KV_HEADS * HEAD_DIM
"""Bytes of the keys and values of a token."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, described by the seconds of an iteration on one rank with two threads."""

    base_s: float
    """Seconds of an iteration without tokens."""
    n_first: int
    """Number of tokens of an iteration that cost `first_s` each; further tokens cost `token_s`
    each."""
    first_s: float
    token_s: float
    sampled_s: float
    """Seconds for each token that is sampled."""
    decode_slot_s: float
    """Seconds for each token of a context that a decode attends to."""
    prompt_pair_s: float
    """Seconds for each pair of tokens of a prompt that attend to each other."""
    n_slots: int = 100_000
    """Number of K/V slots."""

    def iteration_s(self, work: IterationWork) -> float:
        """Returns the seconds that an iteration takes on the whole machine."""
        return (
            self.base_s
            + self.first_s * min(work.n_tokens, self.n_first)
            + self.token_s * max(0, work.n_tokens - self.n_first)
            + self.sampled_s * work.n_sampled
            + self.decode_slot_s * work.n_decode_slots
            + self.prompt_pair_s * work.n_prompt_pairs
        )


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "processor": Machine(0.02, 64, 5e-4, 3e-4, 1e-4, 1.5e-6, 1e-7),
        "accelerator": Machine(0.012, 256, 1e-5, 4e-5, 1e-5, 2e-8, 1e-9),
        "large model": Machine(0.06, 16, 3e-4, 6e-4, 2e-4, 3e-6, 2e-7),
        "four H100": Machine(
            base_s=LAUNCHES_S + WEIGHT_BYTES * N_WEIGHTS / BYTES_PER_S,
            n_first=128,
            first_s=0.0,
            token_s=2 * N_WEIGHTS / OPERATIONS_PER_S,
            sampled_s=0.0,
            decode_slot_s=SLOT_BYTES / BYTES_PER_S,
            prompt_pair_s=4 * N_LAYERS * N_HEADS * HEAD_DIM / OPERATIONS_PER_S,
            n_slots=int((MEMORY_BYTES - WEIGHT_BYTES * N_WEIGHTS) / SLOT_BYTES),
        ),
    }
)
"""A small model on a few cores; an accelerator, on which an iteration of 256 tokens takes little
more than one of a single token; a model whose weights take most of a decode's time; and four GPUs
with a model of 70 billion weights."""


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """The costs of a machine whose layers are divided evenly among the stages."""

    machine: Machine
    n_stages: int = 1
    part: float | None = None
    """Time of a stage as a fraction of the machine's time for the iteration; None means 1 /
    `n_stages`."""
    plan_s: float = 5e-4
    hop_s: float = 0.0
    result_s: float = 5e-4
    request_s: float = 0.0

    def stage_s(self, stage_index: int, work: IterationWork) -> float:
        """Returns the number of seconds for which an iteration occupies a stage."""
        part = 1 / self.n_stages if self.part is None else self.part
        return part * self.machine.iteration_s(work)
