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
    """Address, host:port, where the scheduler listens for frontends. The default is reachable from
    this machine only, since without TLS whoever connects may command the scheduler. Port 0 takes a
    free one."""

    stages: str = ""
    """Addresses, host:port, of the stage controllers in order, separated by commas. When empty, the
    stages are pods that are found through Kubernetes."""

    n_stages: int | None = Field(default=None, ge=1)
    """Number of stages of the pipeline; needed where stages are found through Kubernetes, since
    their number cannot be seen there."""

    namespace: str = "default"
    """Kubernetes namespace of the workers' pods and of the lease."""

    worker_selector: str = "app.kubernetes.io/name=orcinus,app.kubernetes.io/component=worker"
    """Kubernetes label selector that finds the workers' pods."""

    worker_port: int = Field(default=50053, ge=1, lt=65536)
    """Port on which the controllers of pods listen."""

    lease_name: str | None = None
    """Name of the Kubernetes Lease by which several schedulers elect a leader. When not set, this
    scheduler leads without asking, so there must be only one."""

    pod_name: str = ""
    """Name of this pod, written into the lease to show which pod leads."""

    pod_uid: str = ""
    """Uid of this pod, which tells it from another pod of the same name in the lease."""

    pod_ip: str = ""
    """IP address of this pod, written into the lease. Standbys look there whether the leader still
    listens; without it they wait until the lease expires."""

    lease_duration_s: float = Field(default=8.0, gt=0)
    """Seconds without a renewal after which a standby takes over from a leader that is not plainly
    dead. Shorter recovers sooner; longer tolerates a slower API server."""

    retry_period_s: float = Field(default=2.0, gt=0)
    """Seconds between attempts to renew the lease or to get it. Less than half of
    `lease_duration_s`, so that one failed attempt does not cost the lead."""

    pipeline_id: str = "orcinus"
    """Name of the pipeline, carried by every message of it, so that stages refuse messages of
    another pipeline."""

    policy: PolicyName = "chunked"
    """How a batch is filled. `orca` is Algorithm 1 of the paper: a prompt runs whole in one
    iteration. `chunked` also limits a batch to `max_batch_tokens`, so that a long prompt does not
    hold up requests that generate."""

    order: OrderName = "fair"
    """Which waiting request is admitted next. `fcfs` is the paper's: first come, first served.
    `fair` heeds priorities and gives every API key its share by its weight. With one client and no
    priorities both admit in the same order, except that `fair` prefers requests whose beginnings
    are cached once memory is short."""

    ageing_s: float = Field(default=30.0, gt=0)
    """Seconds without an admission after which a priority class rises by one, in the order `fair`.
    This bounds the wait of low priorities: shorter lets them through sooner, longer keeps them
    back."""

    fair_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a batch, drafts included, that clients share out while requests of several API keys
    run; for the order `fair` with the policy `chunked`. Choose as many as an iteration can have
    without taking noticeably longer than with one. A client with few requests then keeps its pace
    beside one that fills batches, at the cost of some throughput, most of all where prompts are
    long. When not set, batches are filled without regard to clients."""

    max_batch_size: int = Field(default=32, ge=1)
    """Requests in one batch at most (the paper's `max_bs`). More gives throughput, fewer gives
    lower latency."""

    max_batch_tokens: int = Field(default=512, ge=1)
    """Tokens in one batch at most, with the policy `chunked`; the token budget of an iteration.
    More gives throughput where reading the weights is slow, fewer gives a steadier pace. Not less
    than `max_batch_size`."""

    speculative_tokens: int = Field(default=8, ge=0, le=64)
    """Draft tokens of a request in one iteration at most. Drafts are the tokens that followed where
    the request's last tokens occurred before; the model verifies them, so answers are the same. 0
    turns drafts off. There are none with the policy `orca` and on GPUs with CUDA graphs."""

    speculative_batch_tokens: int = Field(default=8, ge=1)
    """Tokens in a batch with drafts at most. The more tokens a batch has, the more often drafts
    must have been right lately, so there are none where many requests run. About the number of
    tokens that take as long to compute as the weights take to read."""

    pipeline_depth: int | None = Field(default=None, ge=1)
    """Batches in flight at most (the paper's `n_workers`). When not set, the number of stages, and
    two with one stage, so that the next batch is on its way when the last one returns."""

    n_slots: int | None = Field(default=None, ge=1)
    """K/V slots to use at most (the paper's `n_slots`), in tokens over all requests. When not set,
    all that the stages have memory for."""

    admission: Literal["reserve", "optimistic"] = "reserve"
    """What an admitted request reserves. `reserve` is all the memory that it can ever need, as in
    the paper. `optimistic` is what it needs now and the share of `max_tokens` that other requests
    have used lately: more requests run, and the last one is preempted and recomputed when memory
    runs out."""

    first_token_goal_s: float | None = Field(default=None, gt=0)
    """Seconds within which a request should have its first token. A request that would have it
    later, by the forecast, is refused at once with a retry delay, so that the others keep the goal.
    A tenth of the goal is left for frontend and network. When not set, requests wait while the pool
    has room, and only those are refused whose own time is too short."""

    prefix_cache: bool = True
    """Whether requests that begin with the same tokens share keys and values, also those of
    requests that have ended. Sharing happens only within an API key and a `cache_salt`."""

    max_requests: int = Field(default=1024, ge=1, le=2**15)
    """Requests in the pool at most, running ones included; further ones are refused with a retry
    delay. Bounds the wait for a first token. Ranks have 65,536 rows, for running requests and those
    that have just ended."""

    max_pool_tokens: int = Field(default=2**24, ge=1)
    """Tokens of all requests in the pool at most: prompts, and outputs at their longest. Further
    requests are refused with a retry delay. Bounds this process's memory, at 5 bytes a token."""

    max_frontends: int = Field(default=32, ge=1)
    """Connected frontends at most. Bounds the memory of messages that frontends have not read, 4
    MiB each."""

    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds to wait for a pipeline, at first and after each loss, before this process ends and
    Kubernetes starts it again. Must exceed the time that weights take to load."""

    silence_limit_s: float = Field(default=8.0, gt=0)
    """Seconds after which a silent stage counts as lost. A stage gives a sign of life every second,
    however busy it is. A process that dies is noticed at once; this is for a network that is cut.
    """

    iteration_limit_s: float = Field(default=300.0, gt=0)
    """Seconds after which an iteration that does not return ends the epoch in any case. Must exceed
    the longest iteration: with the policy `orca` a whole prompt runs in one."""

    hang_limit_s: float = Field(default=9.0, gt=0)
    """Seconds that any iteration may take before the epoch ends, besides ten times what iterations
    of its size have taken. More than the workers' `hang_limit_s`, so that the stage that hangs is
    found and ended first."""

    traced_iterations_per_s: float = Field(default=20.0, ge=0)
    """Iterations of traced requests that are recorded as spans per second at most, and as many slow
    ones; bounds the cost of tracing. 0 records only iterations that failed. Without a trace
    endpoint nothing is recorded."""

    record: Path | None = None
    """File to which the schedule is recorded as JSON lines, without text, 256 MiB at most; `python
    -m services.scheduler.replay` runs it again. When not set, nothing is recorded."""

    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that running requests have to finish when the scheduler is told to stop. Longer lets
    long answers end; the pod's grace period must be longer still."""

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
