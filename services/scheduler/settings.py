"""Settings of the scheduler."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from services.common.address import parse
from services.common.memory_limit import MIB, PROCESS
from services.common.settings import HostPort, ServerSettings
from services.scheduler.core.order.registry import OrderName
from services.scheduler.core.policies.registry import PolicyName
from services.scheduler.core.policies.vector_share import MAX_SHARE

# `python -m benchmarks.control.scheduler_memory` measures the memory below; the constants are
# larger than the measurements, since machines differ.
PROCESS_BYTES = 144 * MIB
"""Memory of a scheduler that has no requests: 77 MiB for the process itself, and room for gRPC's
buffers, spans, and accounts of a million K/V blocks."""

CACHE_BYTES = 64 * MIB
"""Memory of the prefix caches of all pipelines: 60 MB when they hold as many blocks as they may
have together."""

REQUEST_BYTES = 20 * 2**10
"""Memory of a request without its tokens: 18 KiB for a request with 256 stop tokens, less than 1
KiB for a request with few stop tokens."""

TOKEN_BYTES = 5
"""Memory of a token in the pool: 4.2 bytes, and spare room at the end of an output that grows."""

FRONTEND_BYTES = 4 * MIB
"""Memory for messages that a frontend has not read: tokens, other updates, log-probabilities, and
copies of messages that are being sent. A frontend is disconnected at the next update if more bytes
than these wait for it."""


RECORD_BYTES = 96 * MIB
"""Memory of a recording: events that wait to be written, and the table of numbers by which the
recording names tokens."""


class SchedulerSettings(ServerSettings):
    """All settings of the scheduler, from `ORCINUS_*` variables or the command line."""

    address: HostPort = "localhost:50052"
    """Address, host:port, where the scheduler listens for frontends. The default is reachable from
    this machine only, because without TLS any process that connects may command the scheduler. With
    port 0 the system chooses a free port."""

    stages: str = ""
    """Addresses, host:port, of the workers' controllers, separated by commas. When empty, the
    workers are pods that are found through Kubernetes."""

    n_stages: int | None = Field(default=None, ge=1)
    """Number of stages of a pipeline. Needed if the workers are found through Kubernetes, which
    does not tell how many stages a pipeline has. When not set, all workers in `stages` are one
    pipeline."""

    max_pipelines: int | None = Field(default=None, ge=1)
    """Largest number of pipelines that serve at the same time. When not set, the workers form as
    many pipelines as they can, and the workers that are left over are spares."""

    worker_deployment: str | None = None
    """Name of the Kubernetes Deployment of the workers. When set, the leading scheduler changes the
    Deployment's number of replicas, so that there are as many pipelines as the waiting requests
    need. `max_pipelines` must be set, too. When not set, the number of workers is left alone."""

    min_pipelines: int = Field(default=1, ge=0)
    """Smallest number of pipelines, with `worker_deployment`. With 0 the model is asleep while
    there are no requests, and the first request starts a pipeline."""

    n_spare_workers: int = Field(default=0, ge=0)
    """Number of workers in addition to the workers of the pipelines, with `worker_deployment`. A
    spare worker takes the place of a lost one at once. A model that is asleep has no spare
    workers."""

    queue_goal_s: float = Field(default=10.0, gt=0)
    """Seconds within which all waiting requests should begin, with `worker_deployment`. If the last
    of them would wait longer, pipelines are added: as many as finish the queue in this time. Choose
    about the time in which a worker starts; a shorter time adds pipelines for bursts that are over
    before a pipeline has started."""

    scale_down_after_s: float = Field(default=300.0, gt=0)
    """Seconds for which fewer pipelines must have been enough before pipelines are removed, with
    `worker_deployment`. The time begins anew with each change of the number. A longer time keeps
    workers through pauses between bursts."""

    sleep_after_s: float = Field(default=600.0, gt=0)
    """Seconds without a request after which the last pipeline is removed, with `min_pipelines` 0.
    Choose a time that is long compared with the time in which a worker starts."""

    namespace: str = "default"
    """Kubernetes namespace of the workers' pods and of the lease."""

    worker_selector: str = "app.kubernetes.io/name=orcinus,app.kubernetes.io/component=worker"
    """Kubernetes label selector that finds the workers' pods."""

    worker_port: int = Field(default=50053, ge=1, lt=65536)
    """Port on which the controllers of pods listen."""

    pod_deletion_cost: bool = False
    """Whether the leader annotates the workers' pods, so that Kubernetes removes the workers of
    whole pipelines when it reduces their number. Needs the right to patch pods, and workers that
    are found through Kubernetes."""

    lease_name: str | None = None
    """Name of the Kubernetes Lease by which several schedulers elect a leader; the first leader
    creates it. When not set, this scheduler leads without asking, so there must be only one."""

    pod_name: str = ""
    """Name of this pod, written into the lease to show which pod leads."""

    pod_uid: str = ""
    """Uid of this pod, written into the lease to distinguish this pod from an earlier or later pod
    with the same name."""

    pod_ip: str = ""
    """IP address of this pod, written into the lease. Standbys connect to the address to see
    whether the leader still listens; without an address they wait until the lease expires, unless
    Kubernetes says that the pod is gone when they first look."""

    lease_duration_s: float = Field(default=8.0, gt=0)
    """Seconds without a renewal of the lease after which a standby takes over. From a leader that
    has certainly ended, a standby takes over sooner. A shorter duration recovers sooner; a longer
    duration tolerates a slower API server."""

    retry_period_s: float = Field(default=2.0, gt=0)
    """Seconds between attempts to renew the lease or to get it. Must be less than half of
    `lease_duration_s`, so that a leader does not lose the lead by one failed attempt."""

    pipeline_id: str = "orcinus"
    """Name of the pipeline. Every message of the pipeline carries the name, so that stages refuse
    messages of another pipeline."""

    policy: PolicyName = "chunked"
    """Rule by which a batch is filled. `orca` is Algorithm 1 of the paper: a whole prompt runs in
    one iteration. `chunked` also limits a batch to `max_batch_tokens`, so that a long prompt does
    not delay requests that are generating tokens. The other policies are for comparisons. An
    installed package may offer further policies; they run inside the scheduler."""

    order: OrderName = "fair"
    """Order in which waiting requests are admitted. `fcfs` is the order of the paper: first come,
    first served. `fair` heeds priorities and divides the service among API keys in proportion to
    their weights. With one client and no priorities both admit in the same order, except that
    `fair` prefers requests whose beginnings are in the prefix cache when memory is short. An
    installed package may offer further orders; they run inside the scheduler."""

    ageing_s: float = Field(default=30.0, gt=0)
    """Seconds without an admission after which a priority class rises by one, in the order `fair`.
    This bounds the wait of requests with low priorities: a shorter time admits them sooner."""

    fair_batch_tokens: int | None = Field(default=None, ge=1)
    """Number of tokens of a batch, drafts included, that are divided among API keys while requests
    of several keys run. For the order `fair` with the policy `chunked`. Choose the largest number
    with which an iteration takes hardly longer than with one token. Then a client with few requests
    keeps its pace beside a client that fills batches, at the cost of some throughput, most of all
    with long prompts. When not set, batches are filled without regard to clients."""

    max_batch_size: int = Field(default=32, ge=1)
    """Largest number of requests in one batch (the paper's `max_bs`). A larger number gives more
    throughput, a smaller number gives lower latency."""

    max_batch_tokens: int = Field(default=512, ge=1)
    """Largest number of tokens in one batch, with a policy that limits them, as `chunked` does: the
    token budget of an iteration. A larger number gives more throughput where reading the weights is
    slow, a smaller number gives a steadier pace. Must be at least `max_batch_size` with `chunked`
    and `sarathi`. A text for an encoder runs whole, so it has at most this many tokens."""

    vector_share: float = Field(default=0.25, gt=0, le=MAX_SHARE)
    """Limit on the time that prompts of requests for vectors (embeddings, scores) add to an
    iteration, as a fraction of the time of an iteration without prompts. For the policy `chunked`,
    while requests that generate tokens run or wait. With a larger number vectors come sooner, and
    running streams have longer gaps between tokens; with the largest number vectors are not
    limited. While no request generates tokens, prompts for vectors fill batches up to
    `max_batch_tokens`."""

    speculative_tokens: int = Field(default=8, ge=0, le=64)
    """Largest number of draft tokens of a request in one iteration. To draft, the scheduler looks
    for an earlier occurrence of the request's last tokens and takes the tokens that followed there.
    The model verifies drafts, so answers do not change. 0 turns drafts off. Of the built-in
    policies only `chunked` has drafts. Nothing is drafted on GPUs with CUDA graphs, for models that
    keep a state of each request, or for requests with a grammar (a format of the output, a forced
    call), penalties, banned words or log-probabilities."""

    speculative_batch_tokens: int = Field(default=8, ge=1)
    """Largest number of tokens in a batch with drafts. The more tokens a batch has, the more often
    drafts must have been right lately, so there are no drafts while many requests run. Choose about
    the number of tokens that take as long to compute as the weights take to read."""

    pipeline_depth: int | None = Field(default=None, ge=1)
    """Largest number of batches in flight (the paper's `n_workers`). When not set, it is the number
    of stages, or two if there is one stage: then another batch is in flight when a batch
    returns."""

    n_slots: int | None = Field(default=None, ge=1)
    """Largest number of K/V slots to use (the paper's `n_slots`), in tokens over all requests. When
    not set, all slots for which the stages have memory are used."""

    admission: Literal["reserve", "optimistic"] = "optimistic"
    """Memory that an admitted request reserves. With `optimistic` it is the memory that the request
    needs now, and the share of `max_tokens` that other requests have used lately. When memory runs
    out, the last request is preempted and recomputed. With `reserve` it is all the memory that the
    request can ever need, as in the paper: no request is recomputed for want of memory, but far
    fewer run if clients set `max_tokens` high or not at all."""

    first_token_goal_s: float | None = Field(default=None, gt=0)
    """Seconds within which a request should have its first token. A request whose first token is
    forecast to come later is refused at once with a retry delay, so that other requests keep the
    goal. A tenth of the goal is left for frontend and network. When not set, requests wait while
    the pool has room, and a request is refused only if its own timeout is too short."""

    prefix_cache: bool = True
    """Whether requests that begin with the same tokens share keys and values. Keys and values of
    requests that have ended are shared, too. Sharing happens only within an API key and a
    `cache_salt`."""

    max_requests: int = Field(default=1024, ge=1, le=2**15)
    """Largest number of requests in the pool, running requests included; further requests are
    refused with a retry delay. Bounds the wait for a first token. The limit of 32,768 comes from
    the tables of the ranks: they have 65,536 rows, for running requests and for requests that have
    just ended."""

    max_pool_tokens: int = Field(default=2**24, ge=1)
    """Largest number of tokens of all requests in the pool: prompts, and outputs at their longest.
    Further requests are refused with a retry delay. Bounds this process's memory, at 5 bytes a
    token."""

    max_frontends: int = Field(default=32, ge=1)
    """Largest number of connected frontends. Bounds the memory of messages that frontends have not
    read, 4 MiB for each frontend."""

    start_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds to wait for a pipeline, at first and after each loss, before this process ends and
    Kubernetes starts it again. Must exceed the time that weights take to load."""

    silence_limit_s: float = Field(default=8.0, gt=0)
    """Largest number of seconds after which a silent stage counts as lost. A stage gives two signs
    of life a second, however busy it is. While an iteration is later than expected, a silence of
    1.5 seconds is enough, or a longer one after a stage was wrongly taken for lost. A process that
    dies is noticed at once; the limits are for stopped processes, and for a network that is cut."""

    iteration_limit_s: float = Field(default=300.0, gt=0)
    """Seconds after which an iteration that does not return ends the epoch in any case. Must exceed
    the longest iteration: with the policy `orca` a whole prompt runs in one iteration."""

    hang_limit_s: float = Field(default=9.0, gt=0)
    """Fixed part, in seconds, of the time after which an iteration that does not return ends the
    epoch. The other part is ten times the time that earlier iterations of about that size have
    taken. Must be more than the workers' `hang_limit_s`, so that the stage that hangs is found and
    ended first."""

    traced_iterations_per_s: float = Field(default=20.0, ge=0)
    """Largest number of iterations with traced requests that are recorded as spans each second. Up
    to the same number of slow iterations per second is recorded in addition. Bounds the cost of
    tracing. 0 records only iterations that failed. Without a trace endpoint nothing is recorded."""

    record: Path | None = None
    """File to which the schedule is recorded as JSON lines, without text, 256 MiB at most; `python
    -m services.scheduler.replay` runs it again. When not set, nothing is recorded."""

    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that running requests have to finish when the scheduler is told to stop and no other
    scheduler takes over. A longer time lets long answers end; the pod's grace period must be longer
    than this time."""

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
        addresses = [str(parse(address.strip())) for address in stages.split(",") if address]
        twice = sorted(address for address, n in Counter(addresses).items() if n > 1)
        if twice:
            raise ValueError(f"a worker is listed twice: {', '.join(twice)}")
        return ",".join(addresses)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not self.stages and self.n_stages is None:
            raise ValueError("stages or n_stages must be given")
        if self.stages and (self.n_stages or 1) > len(self.stage_addresses):
            raise ValueError(
                f"n_stages: {self.n_stages} stages need as many workers, and stages has "
                f"{len(self.stage_addresses)} addresses"
            )
        self._check_scaling()
        if self.max_batch_tokens < self.max_batch_size and self.policy in ("chunked", "sarathi"):
            raise ValueError(
                f"max_batch_tokens: {self.max_batch_tokens} is less than "
                f"max_batch_size {self.max_batch_size}"
            )
        if self.fair_batch_tokens is not None and (self.order, self.policy) != ("fair", "chunked"):
            raise ValueError("fair_batch_tokens is for the order `fair` and the policy `chunked`")
        if 2 * self.retry_period_s >= self.lease_duration_s:
            raise ValueError("retry_period_s must be less than half of lease_duration_s")
        return self

    def _check_scaling(self) -> None:
        if self.worker_deployment is None:
            if self.min_pipelines == 0:
                raise ValueError("min_pipelines: 0 needs worker_deployment, to start workers again")
            return
        if self.stages:
            raise ValueError("worker_deployment is for workers in Kubernetes, without stages")
        if self.max_pipelines is None:
            raise ValueError("worker_deployment needs max_pipelines")
        if self.min_pipelines > self.max_pipelines:
            raise ValueError(
                f"min_pipelines: {self.min_pipelines} is more than "
                f"max_pipelines {self.max_pipelines}"
            )
