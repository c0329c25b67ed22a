"""`python -m benchmarks.paper.baselines --model DIR --baseline NAME`: serves with a baseline.

The options and the output are the same as for `services.local`. The baseline replaces the scheduler
or the stages.
"""

import sys
from typing import Literal

from pydantic import Field

from services.local import __main__ as local
from services.local.launcher import Launcher
from services.local.settings import LocalSettings


class BaselineSettings(LocalSettings):
    """The settings of the local launcher, and the name of the baseline."""

    baseline: Literal["request_level", "microbatch", "padded"]
    """`request_level`: request-level scheduling, with up to `pipeline_depth` batches at a time.
    `microbatch`: request-level scheduling of one batch at a time, which passes through the stages
    in microbatches. `padded`: this project's scheduler, with ranks that pad all spans of a batch to
    the longest span."""

    microbatch_size: int = Field(default=8, ge=1)
    """Largest number of requests in a microbatch."""


class BaselineLauncher(Launcher):
    """Starts a local system in which a baseline replaces the scheduler or the stages."""

    def __init__(self, settings: LocalSettings) -> None:
        super().__init__(settings)
        if not isinstance(settings, BaselineSettings):
            raise TypeError(f"{type(settings).__name__} does not say which baseline")
        self._baseline = settings
        if settings.baseline == "padded":
            self.worker_module = "benchmarks.paper.baselines.padded"
        else:
            self.scheduler_module = "benchmarks.paper.baselines.scheduler"

    def scheduler_options(self, stages: list[str]) -> dict[str, object]:
        """Returns the options of the scheduler. They include the baseline's name if the baseline
        replaces the scheduler."""
        options = super().scheduler_options(stages)
        if self._baseline.baseline == "padded":
            return options
        return {
            **options,
            "baseline": self._baseline.baseline,
            "microbatch-size": self._baseline.microbatch_size,
        }


if __name__ == "__main__":
    sys.exit(local.main(BaselineSettings, BaselineLauncher))
