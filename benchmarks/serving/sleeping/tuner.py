"""`python -m benchmarks.serving.sleeping.tuner`: the tuner, for systems whose ranks compute
nothing.

In each iteration, a rank sleeps for the time that the iteration would take on a known machine.
"""

import sys

from services.tune.__main__ import main
from services.tune.system import TuneLauncher


class SleepingLauncher(TuneLauncher):
    """The tuner's launcher, for systems whose ranks sleep instead of computing."""

    worker_module = "services.arena.sleeping.rank"


if __name__ == "__main__":
    sys.exit(main(SleepingLauncher))
