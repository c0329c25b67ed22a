"""`python -m benchmarks.serving.sleeping.local`: a local system whose ranks compute nothing.

In each iteration, a rank sleeps for the time that the iteration would take on a known machine.
"""

import sys

from services.local.__main__ import main
from services.local.launcher import Launcher


class SleepingLauncher(Launcher):
    """A launcher of local systems whose ranks sleep instead of computing."""

    worker_module = "services.arena.sleeping.rank"


if __name__ == "__main__":
    sys.exit(main(launcher_class=SleepingLauncher))
