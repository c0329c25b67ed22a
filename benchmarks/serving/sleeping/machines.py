"""Machines whose costs are known, so that what is best on them can be told from what is lucky."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from simulator.costs import IterationWork

VARIABLE = "SLEEPING_MACHINE"
"""The environment variable that names the machine."""
SHARING = 1.2
"""Factor of what ranks take that share a layer."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, told by the seconds that an iteration takes on one rank with two threads."""

    base_s: float
    """Without any token."""
    n_first: int
    """Tokens of an iteration that cost `first_s` each; those after them cost `token_s`."""
    first_s: float
    token_s: float
    sampled_s: float
    """Of each token that is sampled."""
    decode_slot_s: float
    """Of each token of a context that a decode attends to."""
    prompt_pair_s: float
    """Of each pair of tokens of a prompt that attend to each other."""

    def iteration_s(self, work: IterationWork) -> float:
        """Returns the seconds that an iteration takes."""
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
    }
)
"""A small model on a few cores; an accelerator, on which an iteration of 256 tokens takes little
more than one of a single token; and a model whose weights take most of a decode's time."""


def machine_here() -> Machine:
    """Returns the machine that the environment names, the first one without."""
    return MACHINES[os.environ.get(VARIABLE, next(iter(MACHINES)))]


def share_of(*, stages: int, tp: int, threads: int) -> float:
    """Returns the part of an iteration's time that a rank takes."""
    return float((2 / threads) ** 0.9) / (stages * tp) * (SHARING if tp > 1 else 1.0)
