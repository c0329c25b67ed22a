"""`python -m services.arena.scheduler`: the scheduler of a real run, with checks and a report.

The scheduler checks the batches of every policy. Some policies answer all requests of a batch
together, as engines without iteration-level scheduling do. For these policies, this scheduler
withholds answers until the whole batch is complete. The environment variable `ARENA_REPORT` names
the file of the report. The report is written when a batch or an answer breaks a rule, or else when
the process ends.
"""

import json
import os
import sys
from atexit import register
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from services.arena.entrants import load_file
from services.arena.referee import RefereedScheduler, Stopped, TimedPolicy
from services.scheduler import __main__ as scheduler
from services.scheduler.building import build_policy, build_scheduler, default_depth
from services.scheduler.core.batch import Batch, Update
from services.scheduler.core.policies.checked import CheckedPolicy
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.settings import SchedulerSettings

FILES, REPORT = "ARENA_FILES", "ARENA_REPORT"
"""Names of environment variables: for the files of policies, separated as in PATH, and for the file
of the report."""


class ReportingScheduler(RefereedScheduler):
    """A scheduler that checks batches and answers, and writes the report when one of them breaks a
    rule."""

    def select(self) -> Batch | None:
        """Returns the next batch, as `RefereedScheduler.select` does.

        Raises:
            Stopped: the batch breaks a rule, or the policy has raised an error.
        """
        with _reporting():
            return super().select()

    def _withhold(self, updates: list[Update]) -> list[Update]:
        with _reporting():
            return super()._withhold(updates)


@contextmanager
def _reporting() -> Iterator[None]:
    """Writes the report if the block raises `Stopped`."""
    try:
        yield
    except Stopped as stopped:
        _write({"stopped": str(stopped)})
        raise


def build(settings: SchedulerSettings, pipeline: Pipeline, pool: RequestPool) -> Scheduler:
    """Returns the scheduler of a pipeline, which checks batches and measures the time of the
    policy.

    Raises:
        Unavailable: the K/V memory is too small for one block.
    """
    depth = settings.pipeline_depth or default_depth(pipeline.n_stages)
    policy = build_policy(settings, n_shares=1 if pipeline.n_stages == 1 else depth)
    # In virtual time all selections have been checked already, and checks would be timed.
    timed = TimedPolicy(policy.policy if isinstance(policy, CheckedPolicy) else policy)
    made = build_scheduler(settings, pipeline, pool, make=ReportingScheduler, policy=timed)
    if isinstance(made, RefereedScheduler):
        register(_report, made, timed)
    return made


def _report(made: RefereedScheduler, timed: TimedPolicy) -> None:
    if not Path(os.environ[REPORT]).exists():
        _write({"n_preemptions": made.n_preemptions, "select_us": timed.mean_us})


def _write(report: Mapping[str, object]) -> None:
    Path(os.environ[REPORT]).write_text(json.dumps(report))


if __name__ == "__main__":
    for file in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        load_file(Path(file))
    sys.exit(scheduler.main(build=build))
