"""The scheduler's metrics, driven as the serving loop and the service drive them."""

import time
from collections.abc import Callable

import pytest
from orcinus.v1 import sampling_pb2, scheduler_pb2, worker_pb2
from prometheus_client import CollectorRegistry

from services.common.errors import InvalidRequest, PoolFull, Unavailable
from services.scheduler.core.admission.adapter_gate import LOAD_ENDS, WantedLoad
from services.scheduler.core.clients.accounts import KeyInFlight, KeyRate
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import FinishReason, Request, RequestId
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.iteration_metrics import MAX_UNTIMED
from services.scheduler.observing.metrics import SchedulerMetrics
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.pipeline.shortfall import UnfitWorker
from tests.exposition import Samples
from tests.fakes import describe_stage
from tests.scheduler.core.workload import build

SUBMISSION = scheduler_pb2.Submission(sampling=sampling_pb2.SamplingParams())


class World:
    """A scheduling core whose life is told to metrics, one step at a time."""

    def __init__(
        self,
        *,
        n_stages: int = 2,
        epoch: int = 7,
        pipeline_depth: int = 2,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.registry = CollectorRegistry()
        self.metrics = SchedulerMetrics(self.registry, clock_ns=clock_ns)
        self.n_stages = n_stages
        self.pipeline_depth = pipeline_depth
        self.begin(epoch)

    def begin(self, epoch: int) -> None:
        members = tuple(
            Member(f"stage-{index}:1", describe_stage(index, self.n_stages))
            for index in range(self.n_stages)
        )
        self.scheduler = build(
            max_batch_size=4,
            n_blocks=16,
            block_size=4,
            pipeline_depth=self.pipeline_depth,
            has_prefix_cache=True,
        )
        self.epoch = self.metrics.observe(Pipeline("p", epoch, members), self.scheduler)

    def submit(
        self,
        name: str,
        *,
        n_prompt: int = 3,
        max_new_tokens: int = 2,
        priority: int = 0,
        deadline: float | None = None,
        token: int = 1,
    ) -> Request:
        request = Request(
            RequestId(name),
            [token] * n_prompt,
            max_new_tokens,
            stop_token_ids=STOP,
            priority=priority,
            deadline=deadline,
        )
        self.scheduler.submit(request)
        self.metrics.requests.submitted(request, SUBMISSION)
        return request

    def send(self) -> int:
        batch = self.scheduler.select()
        assert batch is not None
        for span in batch.spans:
            if span.is_admission:
                self.metrics.requests.admitted(span.request)
        self.epoch.sent(batch, self.scheduler)
        return batch.iteration

    def time(self, iteration: int, stage: int, **ns: int) -> None:
        self.epoch.timed(stage, worker_pb2.IterationTiming(iteration=iteration, **ns))

    def give_back(self, iteration: int, *token_ids: int) -> None:
        updates = self.scheduler.apply(iteration, token_ids)
        for update in updates:
            if update.finish_reason is not None:
                self.metrics.requests.ended(update.request, update.finish_reason)
        self.epoch.returned(iteration, updates, self.scheduler)

    @property
    def samples(self) -> Samples:
        return Samples.of(self.registry)


STOP = frozenset({9})


def test_a_request_is_counted_where_it_ends() -> None:
    it = World()
    it.submit("stops")
    it.submit("is long")
    it.give_back(it.send(), 9, 5)
    it.give_back(it.send(), 5)
    samples = it.samples
    assert samples.sum("orcinus_requests_accepted_total") == 2
    assert samples.sum("orcinus_requests_finished_total", reason="stop") == 1
    assert samples.sum("orcinus_requests_finished_total", reason="length") == 1
    assert samples.sum("orcinus_prompt_tokens_total") == 6
    assert samples.sum("orcinus_generation_tokens_total") == 3
    assert samples.sum("orcinus_request_generation_tokens_sum", reason="stop") == 1
    assert samples.sum("orcinus_request_generation_tokens_sum", reason="length") == 2
    assert samples.sum("orcinus_request_queue_seconds_count") == 2


def test_a_request_that_never_ran_has_no_queue_time_and_no_prompt() -> None:
    it = World()
    waiting, lost = it.submit("gives up"), it.submit("is lost")
    late = it.submit("is late", deadline=1.0)
    [expired] = it.scheduler.expire(1.0)
    assert (expired.request, expired.finish_reason) == (late, FinishReason.TIMED_OUT)
    it.metrics.requests.ended(late, FinishReason.TIMED_OUT)
    assert len(it.scheduler.cancel(waiting)) == 1
    it.metrics.requests.ended(waiting, FinishReason.CANCELLED)
    it.metrics.requests.failed(lost)
    samples = it.samples
    assert samples.sum("orcinus_requests_cancelled_total") == 1
    assert samples.sum("orcinus_requests_failed_total") == 1
    assert samples.sum("orcinus_requests_timed_out_total") == 1
    assert samples.sum("orcinus_requests_accepted_total") == 3
    assert samples.sum("orcinus_request_queue_seconds_count") == 0
    assert samples.sum("orcinus_prompt_tokens_total") == 0
    assert samples.sum("orcinus_request_prompt_tokens_count", reason="failed") == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidRequest("prompt", "is bad"), "invalid"),
        (PoolFull("full", retry_after_s=1), "pool_full"),
        (KeyRate("slowly", retry_after_s=1), "key_limit"),
        (KeyInFlight("too much", retry_after_s=1), "key_limit"),
        (Unavailable("gone"), "unavailable"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rejections_are_counted_by_reason(error: Exception, reason: str) -> None:
    it = World()
    assert it.samples.sum("orcinus_requests_rejected_total") == 0
    it.metrics.requests.rejected(SUBMISSION, error)  # type: ignore[arg-type]
    assert it.samples.sum("orcinus_requests_rejected_total", reason=reason) == 1
    assert it.samples.sum("orcinus_requests_rejected_total") == 1


def test_gauges_are_those_of_the_pool_while_a_pipeline_serves() -> None:
    it = World()
    it.submit("before it opens")
    assert it.samples.sum("orcinus_requests_waiting") == 0
    it.epoch.opened()
    assert it.samples.sum("orcinus_requests_waiting") == 1
    it.send()
    it.submit("later")
    samples = it.samples
    assert samples.sum("orcinus_requests_waiting") == 1
    assert samples.sum("orcinus_requests_running") == 1
    assert samples.sum("orcinus_kv_cache_usage_ratio") == 2 / 16  # 3 + 2 tokens in blocks of 4
    assert samples.sum("orcinus_kv_cache_allocated_ratio") == 1 / 16
    it.epoch.closed(None)
    assert it.samples.sum("orcinus_requests_running") == 0


def test_the_prefix_cache_is_counted_over_epochs() -> None:
    world = World()
    for n_prompt in (9, 10):
        world.submit("r", n_prompt=n_prompt, max_new_tokens=1)
        world.give_back(world.send(), 1)
    assert world.samples.sum("orcinus_prefix_cache_queried_tokens_total") == 9 + 10
    assert world.samples.sum("orcinus_prefix_cache_hit_tokens_total") == 9, "a block and its rest"
    assert world.samples.sum("orcinus_prefix_cache_unused_ratio") == 0, "no pipeline has opened"
    world.epoch.opened()
    assert world.samples.sum("orcinus_prefix_cache_unused_ratio") == 3 / 16
    world.submit("large", n_prompt=63, max_new_tokens=1, token=2)
    world.give_back(world.send(), 1)
    assert world.samples.sum("orcinus_prefix_cache_evicted_blocks_total") == 3
    world.begin(epoch=8)
    world.submit("after", n_prompt=5, max_new_tokens=1)
    world.give_back(world.send(), 1)
    assert world.samples.sum("orcinus_prefix_cache_queried_tokens_total") == 9 + 10 + 63 + 5
    assert world.samples.sum("orcinus_prefix_cache_hit_tokens_total") == 9, "it was empty"


def test_the_gateway_reads_the_shape_of_the_cache() -> None:
    it = World()
    it.epoch.opened()
    [labels] = it.samples.labels("orcinus_cache_config_info")
    assert labels == {"block_size": "4", "num_gpu_blocks": "16"}


def test_workers_that_do_not_fit_are_named_as_long_as_they_do_not() -> None:
    it = World()
    named = UnfitWorker("10.0.0.1:1", "pod-1", "block_size 16, not 32")
    old = UnfitWorker("10.0.0.2:1", "", "protocol 10, not 11")
    it.metrics.note_unfit((named, old))
    assert it.samples.labels("orcinus_unfit_worker") == [
        {"worker": "pod-1", "says": "block_size 16, not 32"},
        {"worker": "10.0.0.2:1", "says": "protocol 10, not 11"},
    ]
    it.metrics.note_unfit(())
    assert it.samples.labels("orcinus_unfit_worker") == []


def test_epochs_that_form_are_lost_or_never_form() -> None:
    it = World(epoch=3)
    it.epoch.closed("a stage did not join")
    it.begin(4)
    it.epoch.opened()
    assert it.samples.sum("orcinus_pipeline_up") == 1
    it.epoch.closed("stage 1 is gone")
    it.begin(5)
    it.epoch.opened()
    it.epoch.closed(None)
    samples = it.samples
    assert samples.sum("orcinus_pipeline_up") == 0
    assert samples.sum("orcinus_pipeline_epoch") == 5
    assert samples.sum("orcinus_epochs_formed_total") == 2
    assert samples.sum("orcinus_epochs_not_formed_total") == 1
    assert samples.sum("orcinus_pipeline_losses_total") == 1


def test_sizes_of_batches() -> None:
    it = World()
    it.submit("a", n_prompt=5)
    it.submit("b", n_prompt=2)
    first = it.send()
    it.give_back(first, 5, 5)
    it.send()
    samples = it.samples
    assert samples.sum("orcinus_iteration_batch_size_sum") == 4
    assert samples.sum("orcinus_iteration_batch_tokens_sum") == 5 + 2 + 1 + 1
    assert samples.sum("orcinus_iteration_seconds_count") == 1


def test_stages_are_timed_but_the_ends_of_the_pipeline_have_no_neighbour() -> None:
    it = World(n_stages=3)
    for stage in range(3):
        it.time(1, stage, compute_ns=10**9, receive_ns=2 * 10**9, send_ns=3 * 10**9)
    samples = it.samples
    for name in "012":
        assert samples.sum("orcinus_stage_compute_seconds_sum", stage=name) == 1
    assert [item["stage"] for item in samples.labels("orcinus_stage_receive_seconds_sum")] == [
        "1",
        "2",
    ]
    assert [item["stage"] for item in samples.labels("orcinus_stage_send_seconds_sum")] == [
        "0",
        "1",
    ]


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "after the result"])
def test_overhead_is_what_stages_did_not_compute(is_late: bool) -> None:
    it = World()
    it.submit("a")
    iteration = it.send()
    it.time(iteration, 1, compute_ns=1)
    if not is_late:
        it.time(iteration, 0, compute_ns=1)
    it.give_back(iteration, 5)
    if is_late:
        assert it.samples.sum("orcinus_iteration_overhead_seconds_count") == 0
        it.time(iteration, 0, compute_ns=1)
    samples = it.samples
    assert samples.sum("orcinus_iteration_overhead_seconds_count") == 1
    overhead_s = samples.sum("orcinus_iteration_overhead_seconds_sum")
    assert overhead_s == pytest.approx(samples.sum("orcinus_iteration_seconds_sum") - 2e-9)


def test_overhead_begins_when_there_is_room_in_the_pipeline() -> None:
    now_s = [0.0]
    it = World(pipeline_depth=3, clock_ns=lambda: int(now_s[0] * 1e9))
    for name in "abc":
        it.submit(name)
        it.send()  # there are two stages, so the third waits for the first to return
    sums = []
    for iteration in (1, 2, 3):
        now_s[0] += 10
        it.give_back(iteration, 5)
        for stage in (0, 1):
            it.time(iteration, stage, compute_ns=4 * 10**9)
        sums.append(it.samples.sum("orcinus_iteration_overhead_seconds_sum"))
    assert sums == [10 - 8, 2 + 20 - 8, 14 + 20 - 8]
    assert it.samples.sum("orcinus_iteration_seconds_sum") == 10 + 20 + 30


def test_overhead_is_never_negative() -> None:
    it = World()
    it.submit("a")
    iteration = it.send()
    for stage in (0, 1):
        it.time(iteration, stage, compute_ns=10**12)
    it.give_back(iteration, 5)
    assert it.samples.sum("orcinus_iteration_overhead_seconds_sum") == 0


def test_waiting_requests_are_told_apart_by_their_priorities() -> None:
    it = World()
    assert it.samples.sum("orcinus_requests_waiting_by_priority") == 0
    it.epoch.opened()
    for priority in (-3, 0, 0, 1, 2, 10):
        it.submit(str(priority), priority=priority)
    counts = [
        it.samples.sum("orcinus_requests_waiting_by_priority", priority=kind)
        for kind in ("raised", "normal", "lowered")
    ]
    assert counts == [1, 2, 3]


def test_iterations_whose_timings_never_come_are_forgotten() -> None:
    it = World()
    it.submit("a", n_prompt=3, max_new_tokens=60)
    for number in range(MAX_UNTIMED + 8):
        if it.scheduler.pool.n_waiting + it.scheduler.pool.n_running == 0:
            it.submit(str(number), max_new_tokens=60)
        it.give_back(it.send(), 5)
    assert len(it.epoch._untimed) == MAX_UNTIMED
    it.time(1, 0, compute_ns=1)  # much too late, and no harm


def test_who_leads() -> None:
    it = World()
    it.metrics.set_leading(True)
    assert it.samples.sum("orcinus_leader") == 1
    it.metrics.set_leading(False)
    assert it.samples.sum("orcinus_leader") == 0


def test_gauges_are_those_of_all_pipelines_together() -> None:
    it = World()
    it.epoch.opened()
    first = it.scheduler
    pool = first.pool.beside()
    second = Scheduler(
        pool,
        KVManager(n_blocks=48, block_size=4),
        policy=OrcaPolicy(max_batch_size=4),
        pipeline_depth=1,
    )
    member = Member("other:1", describe_stage())
    epoch = it.metrics.observe(Pipeline("q", 8, (member,), number=1), second)
    assert it.samples.sum("orcinus_pipelines") == 1
    epoch.opened()
    for core in (first, second):
        core.adopt()
    assert it.samples.sum("orcinus_pipelines") == 2
    assert it.samples.sum("orcinus_pipeline_epoch") == 8
    assert it.samples.sum("orcinus_cache_config_info", block_size="4", num_gpu_blocks="64") == 1
    requests = [it.submit(name, n_prompt=3, max_new_tokens=5) for name in ("a", "b", "c")]
    it.send()
    batch = second.select()
    assert batch is not None
    for span in batch.spans:
        it.metrics.requests.admitted(span.request)
    epoch.sent(batch, second)
    assert {request.pipeline for request in requests} == {0, 1}
    assert it.samples.sum("orcinus_requests_running") == 3
    assert it.samples.sum("orcinus_requests_waiting") == 0
    # Each request reserves two blocks, in whichever pipeline it runs.
    assert it.samples.sum("orcinus_kv_cache_usage_ratio") == pytest.approx(6 / 64)
    assert it.samples.sum("orcinus_requests_moved_total") == 0

    n_moved = first.pool.n_running
    moved, _ = first.release_late()
    assert len(moved) == n_moved
    it.epoch.late("iteration 1 has not returned in 0.5 s", moved)
    assert it.samples.sum("orcinus_pipelines_late_total") == 1
    it.epoch.closed("stage 0 is gone")
    assert it.samples.sum("orcinus_pipelines") == it.samples.sum("orcinus_pipeline_up") == 1
    assert it.samples.sum("orcinus_pipeline_losses_total") == 1
    assert it.samples.sum("orcinus_requests_running") == 3 - n_moved
    assert it.samples.sum("orcinus_requests_waiting") == n_moved
    assert it.samples.sum("orcinus_cache_config_info", num_gpu_blocks="48") == 1
    second.apply(batch.iteration, [1] * len(batch.spans))
    batch = second.select()
    assert batch is not None
    for span in batch.spans:
        if span.is_admission:
            it.metrics.requests.admitted(span.request)
    assert it.samples.sum("orcinus_requests_moved_total") == n_moved

    epoch.closed(None)
    assert it.samples.sum("orcinus_pipelines") == it.samples.sum("orcinus_pipeline_up") == 0


def test_wanted_pipelines_queued_tokens_and_the_state_are_gauges() -> None:
    it = World()
    it.metrics.note_wanted(3)
    it.metrics.ask_queued(lambda: 70)
    it.metrics.ask_state(lambda: "asleep")
    assert it.samples.sum("orcinus_model_state") == 1
    assert it.samples.sum("orcinus_model_state", state="asleep") == 1
    assert it.samples.sum("orcinus_pipelines_wanted") == 3
    assert it.samples.sum("orcinus_tokens_queued") == 70
    it.metrics.set_leading(False)
    assert it.samples.sum("orcinus_pipelines_wanted") == 0


def test_loads_of_adapters_are_counted_by_their_ends() -> None:
    it = World()
    gate = it.scheduler.pool.adapters
    gate.begin((), 2)
    for name in "abc":
        it.scheduler.pool.shared.adapters.want(WantedLoad(name, "/x", lambda *_: None))
    assert it.samples.sum("orcinus_adapter_loads_total") == 0
    for end in LOAD_ENDS:
        change = gate.next_change(())
        assert change is not None
        if end == "loaded":
            gate.note_loaded(change.load_id, "a digest")
        elif end == "failed":
            gate.note_failed(change.load_id, "broken")
        else:
            it.scheduler.suspend()
        assert it.samples.sum("orcinus_adapter_loads_total", outcome=end) == 1
    it.scheduler.suspend()  # without a load in progress
    assert it.samples.sum("orcinus_adapter_loads_total") == 3
