"""Settings of the scheduler."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from services.common.memory_limit import MIB, PROCESS
from services.common.settings import ServerSettings
from services.scheduler.core.order.registry import OrderName
from services.scheduler.core.policies.registry import PolicyName

# `python -m benchmarks.control.scheduler_memory` measures these, with room for what differs.
PROCESS_BYTES = 144 * MIB
"""Memory of a scheduler that has no requests: 77 MiB, gRPC's buffers, spans, and accounts of a
million K/V blocks."""

CACHE_BYTES = 64 * MIB
"""Memory of a prefix cache with as many blocks as it may have: 60 MB."""

REQUEST_BYTES = 20 * 2**10
"""Memory of a request besides its tokens: 18 KiB where it has 256 stop tokens, else less than 1."""

TOKEN_BYTES = 5
"""Memory of a token in the pool: 4.2 bytes, and room at the end of an output that grows."""

FRONTEND_BYTES = 4 * MIB
"""Memory of what a frontend does not read: tokens, other updates, log-probabilities, and copies of
those on their way. With more it is cut off when the next iteration brings anything."""


RECORD_BYTES = 96 * MIB
"""Memory of a recording: events that wait to be written, and the numbers of tokens."""


class SchedulerSettings(ServerSettings):
    """All settings of the scheduler, from `ORCINUS_*` variables or the command line."""

    address: str = "127.0.0.1:50052"
    """Where to listen for frontends, host:port; this machine only unless told otherwise. Port 0
    takes a free one."""

    stages: str = ""
    """Addresses of the stage controllers, host:port, in order, separated by commas; when empty,
    the stages are pods and found through Kubernetes."""

    n_stages: int | None = Field(default=None, ge=1)
    """Stages of the pipeline, where they are found through Kubernetes."""

    namespace: str = "default"
    """Namespace of the workers' pods and of the lease."""

    worker_selector: str = "app.kubernetes.io/name=orcinus,app.kubernetes.io/component=worker"
    """Label selector of the workers' pods."""

    worker_port: int = Field(default=50053, ge=1, lt=65536)
    """Where the controllers of pods listen."""

    lease_name: str | None = None
    """Lease by which several schedulers elect the one that leads; without it there is only this
    one."""

    pod_name: str = ""
    """Name of this pod, to say who leads."""

    pod_uid: str = ""
    """Uid of this pod, for the same."""

    pod_ip: str = ""
    """Address of this pod, at which standbys look whether the leader is there; without it they wait
    for the lease to expire."""

    lease_duration_s: float = Field(default=8.0, gt=0)
    """Seconds that others wait for a leader that shows no sign of life and is not plainly dead."""

    retry_period_s: float = Field(default=2.0, gt=0)
    """Seconds between attempts to renew the lease or to get it; less than half the duration."""

    pipeline_id: str = "orcinus"
    """Name of the pipeline, in every message of it."""

    policy: PolicyName = "chunked"
    """How batches are filled: `orca` is Algorithm 1 of the paper, `chunked` the same with
    `max_batch_tokens`, so that a long prompt does not hold up the requests that generate."""

    order: OrderName = "fair"
    """Who is admitted next: `fcfs` is the paper's, whoever came first; `fair` heeds priorities, and
    gives every API key its share by its weight. Where nobody has a key or names a priority, both
    are the same, but that `fair` prefers what the prefix cache has once memory is short."""

    ageing_s: float = Field(default=30.0, gt=0)
    """Seconds in which nobody of a priority is admitted after which it comes one class earlier, in
    the order `fair`; so nobody waits for ever."""

    fair_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a batch while requests of several API keys run, in the order `fair` and the policy
    `chunked`, drafts included: so few that an iteration with them takes hardly longer than with
    one. Who has few requests so keeps its pace beside one that fills batches, whose requests take
    turns then and whose prompts get what is left, for some of the throughput, most where prompts
    are long; who has fewest is not limited, nor are those who have equally many. When not set, all
    ride that fit."""

    max_batch_size: int = Field(default=32, ge=1)
    """Requests in one batch at most (the paper's max_bs); more gives throughput, fewer latency."""

    max_batch_tokens: int = Field(default=512, ge=1)
    """Tokens in one batch of the policy `chunked` at most; more gives throughput where weights are
    slow to read, fewer a steadier pace. Not less than `max_batch_size`."""

    speculative_tokens: int = Field(default=8, ge=0, le=64)
    """Tokens of a request in one iteration at most that are drafts: they followed where its last
    tokens occurred before, and are taken as far as the model says the same. Tokens are the same
    without. 0 is off; so are the policy `orca` and GPUs with graphs of decodes."""

    speculative_batch_tokens: int = Field(default=8, ge=1)
    """Tokens in a batch with drafts at most. With `n` of that in it, drafts must be right as often
    as `n` is a part of it, lately and for each request; so there are none where many requests
    run. About the number of tokens whose computing takes as long as reading the weights."""

    pipeline_depth: int | None = Field(default=None, ge=1)
    """Batches in flight at most (the paper's n_workers); when not set, as many as there are stages,
    and two with one stage, so that the next batch is there when the last one is finished."""

    n_slots: int | None = Field(default=None, ge=1)
    """K/V slots to use at most, in tokens; all that the stages have when not set."""

    admission: Literal["reserve", "optimistic"] = "reserve"
    """What an admitted request reserves: `reserve` all the memory that it can need, as in the
    paper, `optimistic` what it needs now and a part of what others use of their `max_tokens`. Then
    more requests run, and the last one is put down and recomputed where memory runs out."""

    first_token_goal_s: float | None = Field(default=None, gt=0)
    """Seconds in which a request should have its first token: one that would have it later, by what
    waits before it, is refused at once with a retry delay, so that others have theirs in time. A
    tenth of it is left for frontend and network. When not set, all wait that there is room for, and
    only those are refused whose own time is too short."""

    prefix_cache: bool = True
    """Whether requests that begin with the same tokens share their keys and values, and find those
    of requests that have ended."""

    max_requests: int = Field(default=1024, ge=1, le=2**15)
    """Requests in the pool at most, running ones included; more are refused with a retry delay.
    Ranks have 65,536 rows for those that run and those that have just ended."""

    max_pool_tokens: int = Field(default=2**24, ge=1)
    """Tokens that the requests in the pool may come to at most, prompts and outputs together; more
    are refused with a retry delay. Bounds this process's memory, at 5 bytes a token."""

    max_frontends: int = Field(default=32, ge=1)
    """Frontends connected at most: bounds the memory of what they do not read."""

    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds to wait for a pipeline, at first and after a loss, before this process gives up:
    enough to load the weights."""

    silence_limit_s: float = Field(default=8.0, gt=0)
    """Seconds after which a stage that says nothing counts as lost; it gives a sign of life every
    second, however busy it is. A process that dies is noticed at once, a network that is cut is
    not."""

    iteration_limit_s: float = Field(default=300.0, gt=0)
    """Seconds after which an iteration that does not return ends the epoch in any case; must exceed
    the longest one, and with the policy `orca` a long prompt runs in one."""

    hang_limit_s: float = Field(default=9.0, gt=0)
    """Seconds after which any other iteration that does not return ends the epoch; those that take
    long, by what iterations of their size have taken, may take ten times that in addition. More
    than the workers', who find and end the rank that hangs."""

    traced_iterations_per_s: float = Field(default=20.0, ge=0)
    """Iterations of recorded requests that are recorded too, per second at most, and as many again
    that were slow; only where there are traces at all. 0 records only those that failed."""

    record: Path | None = None
    """File to which all that is told to watchers is written, with what `services.scheduler.replay`
    needs to run the schedule again, and no text; 256 MiB at most. Not set, nothing is recorded."""

    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that running requests get to finish when the scheduler is told to stop."""

    def memory_parts(self) -> Mapping[str, int]:
        """Returns the memory that the scheduler may need at most, in bytes, by setting."""
        return {
            PROCESS: PROCESS_BYTES,
            "prefix_cache": self.prefix_cache * CACHE_BYTES,
            "max_requests": self.max_requests * REQUEST_BYTES,
            "max_pool_tokens": self.max_pool_tokens * TOKEN_BYTES,
            "max_frontends": self.max_frontends * FRONTEND_BYTES,
            "record": (self.record is not None) * RECORD_BYTES,
        }

    @property
    def stage_addresses(self) -> list[str]:
        return [address.strip() for address in self.stages.split(",")] if self.stages else []

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages: str) -> str:
        for address in filter(None, stages.split(",")):
            host, _, port = address.strip().rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"{address!r} is not host:port")
        return stages

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not self.stages and self.n_stages is None:
            raise ValueError("stages or n_stages must be given")
        if self.stages and self.n_stages not in (None, len(self.stage_addresses)):
            raise ValueError(f"n_stages is {self.n_stages}, and stages has other many addresses")
        if self.policy == "chunked" and self.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                f"max_batch_tokens: {self.max_batch_tokens} is less than "
                f"max_batch_size {self.max_batch_size}"
            )
        if self.fair_batch_tokens is not None and (self.order, self.policy) != ("fair", "chunked"):
            raise ValueError("fair_batch_tokens is for the order `fair` and the policy `chunked`")
        if 2 * self.retry_period_s >= self.lease_duration_s:
            raise ValueError("retry_period_s must be less than half of lease_duration_s")
        return self
