"""The observer of pace, for pipelines whose iterations have the same numbers."""

from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.request import Request, RequestId
from services.scheduler.observing.pace import Pace
from services.scheduler.pipeline.membership import Member, Pipeline
from services.scheduler.settings import SchedulerSettings
from tests.fakes import describe_stage
from tests.scheduler.core.workload import build


def test_iterations_of_two_pipelines_are_told_apart() -> None:
    pace = Pace(AdmissionControl(goal_s=None, is_fair=False), SchedulerSettings(n_stages=1))
    pipeline = Pipeline("p", 1, (Member("a:1", describe_stage()),))
    sent = []
    for name in ("a", "b"):
        scheduler = build(max_batch_size=4, n_blocks=16, block_size=4, pipeline_depth=1)
        epoch = pace.observe(pipeline, scheduler)
        scheduler.submit(Request(RequestId(name), [1, 2], 2, stop_token_ids=frozenset()))
        batch = scheduler.select()
        assert batch is not None
        epoch.sent(batch, scheduler)
        sent.append((epoch, batch.iteration, scheduler))
    assert sent[0][1] == sent[1][1]
    for epoch, iteration, scheduler in sent:
        epoch.returned(iteration, scheduler.apply(iteration, [5]), scheduler)
