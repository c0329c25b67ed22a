"""Reports of a stage and those who watch it."""

import pytest
from orcinus.v1 import worker_pb2

from services.common.errors import StaleEpoch
from services.worker.controller.epoch import Epoch
from services.worker.controller.report_feed import MAX_UNREAD_REPORTS, ReportFeed


def feed_in(epoch: int) -> tuple[ReportFeed, Epoch]:
    current = Epoch()
    current.advance(worker_pb2.JoinPipelineRequest(pipeline_id="p", epoch=epoch))
    return ReportFeed(current), current


async def test_every_watcher_has_every_report_that_comes_while_it_watches() -> None:
    feed, _ = feed_in(1)
    feed.publish(b"before")
    with feed.watch(1) as first:
        feed.publish(b"one")
        with feed.watch(1) as second:
            feed.publish(b"two")
            feed.end()
            assert [report async for report in second] == [b"two"]
        assert [report async for report in first] == [b"one", b"two"]


async def test_a_watcher_that_does_not_read_is_let_go() -> None:
    feed, _ = feed_in(1)
    with feed.watch(1) as reports:
        for _ in range(MAX_UNREAD_REPORTS + 10):
            feed.publish(b"x")
        assert [report async for report in reports] == [b"x"] * MAX_UNREAD_REPORTS


async def test_heartbeats_and_failures_name_the_epoch() -> None:
    feed, _ = feed_in(7)
    with feed.watch(7) as reports:
        feed.publish_heartbeat()
        feed.publish_failure("out of memory")
        heartbeat, failure = [
            worker_pb2.WatchStageResponse.FromString(await anext(reports)) for _ in range(2)
        ]
    assert heartbeat.WhichOneof("report") == "heartbeat"
    assert failure.failure.reason == "out of memory"
    for report in (heartbeat, failure):
        assert (report.pipeline_id, report.epoch) == ("p", 7)


async def test_nobody_watches_another_epoch() -> None:
    feed, epoch = feed_in(1)
    with pytest.raises(StaleEpoch), feed.watch(2):
        pass
    with feed.watch(1) as reports:
        feed.publish(b"last")
        epoch.advance(worker_pb2.JoinPipelineRequest(epoch=2))
        feed.end()
        assert await anext(reports) == b"last"
        with pytest.raises(StaleEpoch):
            await anext(reports)
