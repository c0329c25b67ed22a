"""`python -m benchmarks.baselines --model DIR --baseline NAME`: `services.local` with a baseline in
the place of the scheduler; options and output are the same."""

import sys

from pydantic import Field

from benchmarks.baselines.scheduler import Baseline
from services.local import __main__ as local
from services.local.launcher import Launcher
from services.local.settings import LocalSettings


class BaselineSettings(LocalSettings):
    """Those of the local launcher, and which baseline."""

    baseline: Baseline
    """`request_level`: whole batches, as many at a time as are in flight. `microbatch`: one at a
    time, in microbatches through the stages."""

    microbatch_size: int = Field(default=8, ge=1)
    """Requests in a microbatch."""


class BaselineLauncher(Launcher):
    """Starts a baseline instead of the scheduler."""

    scheduler_module = "benchmarks.baselines.scheduler"

    def __init__(self, settings: LocalSettings) -> None:
        super().__init__(settings)
        if not isinstance(settings, BaselineSettings):
            raise TypeError(f"{type(settings).__name__} does not say which baseline")
        self._baseline = settings

    def scheduler_options(self, stages: list[str]) -> dict[str, object]:
        """What the scheduler is told, and which baseline it is."""
        return {
            **super().scheduler_options(stages),
            "baseline": self._baseline.baseline,
            "microbatch-size": self._baseline.microbatch_size,
        }


if __name__ == "__main__":
    sys.exit(local.main(BaselineSettings, BaselineLauncher))
