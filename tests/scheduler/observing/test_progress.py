"""The observer of progress, driven as the serving loop drives it."""

from services.scheduler.core.request import Request, RequestId
from services.scheduler.observing.progress import IterationProgress
from services.scheduler.pipeline.membership import Member, Pipeline
from tests.fakes import describe_stage
from tests.scheduler.core.workload import build


def test_iterations_that_return_are_progress_and_requests_count_until_the_epoch_ends() -> None:
    told: list[int] = []
    progress = IterationProgress(on_iteration=lambda: told.append(progress.n_requests))
    assert progress.n_requests == 0
    scheduler = build(max_batch_size=4, n_blocks=16, block_size=4, pipeline_depth=1)
    epoch = progress.observe(Pipeline("p", 1, (Member("a:1", describe_stage()),)), scheduler)
    epoch.opened()
    for name in ("a", "b"):
        scheduler.submit(Request(RequestId(name), [1, 2], 2, stop_token_ids=frozenset()))
    batch = scheduler.select()
    assert batch is not None
    epoch.sent(batch, scheduler)
    assert told == [0]
    epoch.returned(batch.iteration, scheduler.apply(batch.iteration, [5, 5]), scheduler)
    assert told == [0, 2]
    epoch.closed("stage 0 is gone")
    assert progress.n_requests == 0


def test_requests_count_as_long_as_any_pipeline_serves() -> None:
    progress = IterationProgress(on_iteration=lambda: None)
    scheduler = build(max_batch_size=4, n_blocks=16, block_size=4, pipeline_depth=1)
    pipeline = Pipeline("p", 1, (Member("a:1", describe_stage()),))
    first, second = (progress.observe(pipeline, scheduler) for _ in range(2))
    scheduler.submit(Request(RequestId("a"), [1, 2], 2, stop_token_ids=frozenset()))
    first.closed("stage 0 is gone")
    assert progress.n_requests == 1
    second.closed(None)
    assert progress.n_requests == 0
