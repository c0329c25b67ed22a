"""Settings of the scheduler."""

from typing import Literal

from pydantic import Field, field_validator

from services.common.settings import ServiceSettings


class SchedulerSettings(ServiceSettings):
    """Everything that can be set, from `ORCINUS_*` variables or the command line."""

    address: str = "0.0.0.0:50052"
    """Where to listen for frontends, host:port; port 0 takes a free one."""

    stages: str
    """Addresses of the stage controllers, host:port, in order, separated by commas."""

    pipeline_id: str = "orcinus"
    """Name of the pipeline, in every message of it."""

    policy: Literal["orca"] = "orca"
    """Who rides the next iteration: `orca` is Algorithm 1 of the paper."""

    max_batch_size: int = Field(default=32, ge=1)
    """Requests in one batch at most (the paper's max_bs); more gives throughput, fewer latency."""

    pipeline_depth: int | None = Field(default=None, ge=1)
    """Batches in flight at most (the paper's n_workers); the number of stages when not set."""

    n_slots: int | None = Field(default=None, ge=1)
    """K/V slots to use at most, in tokens; all that the stages have when not set."""

    max_requests: int = Field(default=1024, ge=1)
    """Requests in the pool at most, running ones included; more are refused with a retry delay."""

    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds to wait for all stages to have loaded their weights."""

    silence_limit_s: float = Field(default=300.0, gt=0)
    """Seconds after which a stage that reports nothing, or an iteration that does not return,
    counts as lost; must exceed the longest iteration. A stage that dies is noticed at once."""

    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that running requests get to finish when the scheduler is told to stop."""

    ready_fd: int | None = None
    """File descriptor on which a local launcher waits for the address; binds this process's life to
    the launcher's."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe messages to log."""

    @property
    def stage_addresses(self) -> list[str]:
        return [address.strip() for address in self.stages.split(",")]

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages: str) -> str:
        for address in stages.split(","):
            host, _, port = address.strip().rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"{address!r} is not host:port")
        return stages
