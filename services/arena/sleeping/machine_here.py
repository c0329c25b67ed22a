"""The machine that sleeping ranks imitate. An environment variable names it."""

import os

from simulator.machines import MACHINES, Machine

VARIABLE = "SLEEPING_MACHINE"
"""Environment variable with the name of the machine."""
SHARING = 1.2
"""Factor by which the time of a rank is longer if several ranks share each layer."""


def machine_here() -> Machine:
    """Returns the machine that the environment variable names. If it is not set, returns the first
    machine of `MACHINES`."""
    return MACHINES[os.environ.get(VARIABLE, next(iter(MACHINES)))]


def share_of(*, stages: int, tp: int, threads: int) -> float:
    """Returns a rank's time for an iteration, divided by the time that the machine takes according
    to `MACHINES`. The result is 1 for a single rank with two threads. `stages` is the number of
    stages, `tp` the number of ranks per stage, and `threads` the number of threads per rank."""
    return float((2 / threads) ** 0.9) / (stages * tp) * (SHARING if tp > 1 else 1.0)
