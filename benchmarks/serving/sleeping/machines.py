"""Machines with known costs, on which the truly best settings can be computed."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from simulator.costs import IterationWork

VARIABLE = "SLEEPING_MACHINE"
"""Environment variable with the name of the machine."""
SHARING = 1.2
"""Factor of a rank's time if several ranks share each layer."""


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
    """Returns the machine that the environment names, or the first machine by default."""
    return MACHINES[os.environ.get(VARIABLE, next(iter(MACHINES)))]


def share_of(*, stages: int, tp: int, threads: int) -> float:
    """Returns a rank's time for an iteration, as a part of the machine's time."""
    return float((2 / threads) ** 0.9) / (stages * tp) * (SHARING if tp > 1 else 1.0)
