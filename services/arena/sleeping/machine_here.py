"""The machine that sleeping ranks stand for, which the environment names."""

import os

from simulator.machines import MACHINES, Machine

VARIABLE = "SLEEPING_MACHINE"
"""Environment variable with the name of the machine."""
SHARING = 1.2
"""Factor of a rank's time if several ranks share each layer."""


def machine_here() -> Machine:
    """Returns the machine that the environment names, or the first machine by default."""
    return MACHINES[os.environ.get(VARIABLE, next(iter(MACHINES)))]


def share_of(*, stages: int, tp: int, threads: int) -> float:
    """Returns a rank's time for an iteration, as a part of the machine's time."""
    return float((2 / threads) ** 0.9) / (stages * tp) * (SHARING if tp > 1 else 1.0)
