"""`python -m benchmarks.serving.sleeping.tuner`: the tuner, with a model whose ranks sleep."""

import sys

from services.tune.__main__ import main
from services.tune.system import TuneLauncher


class SleepingLauncher(TuneLauncher):
    """A launcher of stages whose ranks sleep."""

    worker_module = "services.arena.sleeping.rank"


if __name__ == "__main__":
    sys.exit(main(SleepingLauncher))
