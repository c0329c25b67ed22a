"""The directory on a source of pods that a test speaks for, in simulated time."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from services.common.errors import Unavailable
from services.scheduler.cluster.pod_directory import (
    Pod,
    PodChange,
    PodDirectory,
    PodEvent,
    PodsExpired,
    PodsForbidden,
    PodsRefused,
    PodsUnavailable,
)
from tests.simulated_time import simulate

FIRST = "2026-11-20T10:00:00Z"
LATER = "2026-11-20T10:00:01Z"


def pod(
    name: str = "worker-0", ip: str = "10.0.0.1", *, created: str = FIRST, **fields: Any
) -> Pod:
    """A pod that runs."""
    return Pod(name, fields.pop("uid", f"{name} of {created}"), created, ip=ip, **fields)


@dataclass
class Pods:
    """A source that gives what it is told to."""

    pods: list[Pod] = field(default_factory=list)
    list_errors: list[Exception] = field(default_factory=list)
    watch_errors: list[Exception] = field(default_factory=list)
    calls: list[tuple[float, str]] = field(default_factory=list)
    feed: asyncio.Queue[PodEvent | Exception | None] = field(default_factory=asyncio.Queue)
    version: int = 0

    async def list_pods(self) -> tuple[Sequence[Pod], str]:
        self._called("list")
        if self.list_errors:
            raise self.list_errors.pop(0)
        self.version += 1
        return list(self.pods), str(self.version)

    async def watch_pods(self, version: str) -> AsyncIterator[PodEvent]:
        self._called(f"watch {version}")
        if self.watch_errors:
            raise self.watch_errors.pop(0)
        yield PodEvent(PodChange.NONE, version)
        while (event := await self.feed.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def tell(self, change: PodChange, pod: Pod | None = None) -> None:
        """Sends an event to the watch."""
        self.version += 1
        self.feed.put_nowait(PodEvent(change, str(self.version), pod))

    def _called(self, what: str) -> None:
        self.calls.append((asyncio.get_running_loop().time(), what))

    @property
    def verbs(self) -> list[str]:
        return [what for _, what in self.calls]


def directory(source: Pods, n_stages: int = 2) -> PodDirectory:
    """A directory that pauses for as long as it may."""
    loop = asyncio.get_running_loop()
    return PodDirectory(source, n_stages=n_stages, port=50053, clock=loop.time, jitter=lambda: 1.0)


@contextlib.asynccontextmanager
async def running(source: Pods, n_stages: int = 2) -> AsyncIterator[PodDirectory]:
    """A directory that is kept up to date."""
    pods = directory(source, n_stages)
    task = asyncio.create_task(pods.run())
    await settle()
    try:
        yield pods
        assert not task.done(), task.exception()
    finally:
        task.cancel()


async def settle() -> None:
    """Lets everything happen that needs no time."""
    await asyncio.sleep(0.001)


async def last(coroutine: Coroutine[Any, Any, Any], limit_s: float) -> None:
    """Something must end neither well nor badly within a limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await coroutine
        raise AssertionError("it ended")


def test_addresses_come_as_pods_do_older_ones_first() -> None:
    async def story() -> None:
        source = Pods([pod("worker-b", "10.0.0.9", created=LATER)])
        async with running(source) as pods:
            assert pods.n_stages == 2
            assert pods.addresses() == ["10.0.0.9:50053"]
            source.tell(PodChange.SET, pod("worker-c", "fd00::1"))
            source.tell(PodChange.SET, pod("worker-a", "10.0.0.1", created=LATER))
            await settle()
            expected = ["[fd00::1]:50053", "10.0.0.1:50053", "10.0.0.9:50053"]
            assert pods.addresses() == expected

    simulate(story())


@pytest.mark.parametrize(
    "unusable",
    [
        pod(ip=""),
        pod(is_terminating=True),
        pod(phase="Failed"),
        pod(phase="Succeeded"),
    ],
    ids=["no address", "terminating", "failed", "succeeded"],
)
def test_a_pod_counts_only_while_it_can_be_reached(unusable: Pod) -> None:
    async def story() -> None:
        source = Pods([pod()])
        async with running(source, 1) as pods:
            assert pods.addresses() == ["10.0.0.1:50053"]
            source.tell(PodChange.SET, unusable)
            await settle()
            assert pods.addresses() == []
            assert pods.leaving() == (["10.0.0.1:50053"] if unusable.is_terminating else [])

    simulate(story())


def test_a_pod_counts_before_it_is_ready() -> None:
    async def story() -> None:
        async with running(Pods([pod(phase="Pending")]), 1) as pods:
            assert pods.addresses() == ["10.0.0.1:50053"]

    simulate(story())


def test_a_pod_that_comes_back_under_its_name_is_another_pod() -> None:
    async def story() -> None:
        source = Pods([pod()])
        async with running(source, 1) as pods:
            source.tell(PodChange.SET, pod(ip="10.0.0.2", created=LATER))
            source.tell(PodChange.DELETED, pod())
            await settle()
            assert pods.addresses() == ["10.0.0.2:50053"]

    simulate(story())


def test_pods_with_one_address_are_one_worker_and_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> list[str]:
        source = Pods([pod("a"), pod("b", created=LATER), pod("c", "10.0.0.2")])
        async with running(source) as pods:
            source.tell(PodChange.SET, pod("d", "10.0.0.3", created=LATER))
            await settle()
            return pods.addresses()

    assert simulate(run()) == ["10.0.0.1:50053", "10.0.0.2:50053", "10.0.0.3:50053"]
    [warning] = [one.message for one in caplog.records if "one address" in one.message]
    assert warning == "pods a, b have one address, 10.0.0.1:50053"


def test_changed_waits_for_what_makes_a_difference() -> None:
    async def story() -> None:
        source = Pods([pod()])
        async with running(source, 1) as pods:
            change = asyncio.create_task(pods.changed())
            source.tell(PodChange.SET, pod(phase="Pending"))
            source.tell(PodChange.NONE)
            await settle()
            assert not change.done()
            source.tell(PodChange.DELETED, pod())
            await change
            assert pods.addresses() == []
            await last(pods.changed(), 10)

    simulate(story())


def test_a_watch_that_ends_goes_on_where_it_was() -> None:
    async def story() -> None:
        source = Pods([pod()])
        async with running(source, 1) as pods:
            await asyncio.sleep(300)
            source.tell(PodChange.NONE)
            source.feed.put_nowait(None)
            await settle()
            assert source.verbs == ["list", "watch 1", "watch 2"]
            source.tell(PodChange.DELETED, pod())
            await settle()
            assert pods.addresses() == []

    simulate(story())


def test_a_version_that_is_too_old_has_the_pods_listed_again() -> None:
    async def story() -> None:
        source = Pods([pod()])
        async with running(source, 1) as pods:
            await asyncio.sleep(300)
            source.pods = [pod(ip="10.0.0.2", created=LATER)]
            source.feed.put_nowait(PodsExpired())
            await settle()
            assert source.verbs == ["list", "watch 1", "list", "watch 2"]
            assert pods.addresses() == ["10.0.0.2:50053"]

    simulate(story())


def test_trouble_loses_no_address_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        source = Pods([pod()])
        async with running(source, 1) as pods:
            await asyncio.sleep(60)
            source.list_errors = [PodsUnavailable("no way") for _ in range(4)]
            source.watch_errors = [PodsUnavailable("no way") for _ in range(3)]
            source.feed.put_nowait(PodsUnavailable("no way"))
            await settle()
            assert pods.addresses() == ["10.0.0.1:50053"]
            source.pods = [pod(ip="10.0.0.2", created=LATER)]
            await pods.changed()
            await asyncio.sleep(60)
            assert pods.addresses() == ["10.0.0.2:50053"]

    simulate(story())
    messages = [record.message for record in caplog.records]
    assert messages.count("pods cannot be watched: no way") == 1
    assert messages.count("pods are watched again") == 1


def test_pauses_grow_up_to_a_limit_and_start_anew_after_a_watch_that_lasted() -> None:
    async def story() -> None:
        source = Pods(list_errors=[PodsUnavailable("no way") for _ in range(12)])
        async with running(source, 1):
            await asyncio.sleep(400)
            times = [time for time, verb in source.calls if verb == "list"]
            pauses = [later - earlier for earlier, later in pairwise(times)]
            assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, *[30.0] * 4])
            source.feed.put_nowait(PodsUnavailable("no way"))
            lost_at = asyncio.get_running_loop().time()
            await asyncio.sleep(1)
            assert source.calls[-1][0] - lost_at < 0.3

    simulate(story())


def test_a_server_that_ends_every_watch_is_not_stormed() -> None:
    async def story() -> None:
        source = Pods([pod()])
        async with running(source, 1):
            for _ in range(100):
                source.feed.put_nowait(None)
            await asyncio.sleep(60)
            assert len(source.calls) < 15

    simulate(story())


@pytest.mark.parametrize("errors", ["list_errors", "watch_errors"])
def test_a_refusal_that_lasts_ends_the_directory_and_says_what_is_missing(errors: str) -> None:
    async def story() -> None:
        source = Pods()
        refusals = [PodsRefused('User "x" cannot list resource "pods"') for _ in range(100)]
        setattr(source, errors, refusals)
        with pytest.raises(PodsForbidden, match='User "x" cannot list resource "pods"') as error:
            await directory(source).run()
        assert isinstance(error.value, Unavailable)  # ends the process with a message
        assert 30 <= asyncio.get_running_loop().time() <= 61

    simulate(story())


def test_a_refusal_that_passes_is_survived() -> None:
    async def story() -> None:
        source = Pods([pod()])
        source.list_errors = [PodsRefused("not yet") for _ in range(5)]
        async with running(source, 1) as pods:
            await pods.changed()
            assert pods.addresses() == ["10.0.0.1:50053"]
            await asyncio.sleep(60)
            # A Role was deleted, and is applied again an hour later.
            source.list_errors = [PodsRefused("not now") for _ in range(150)]
            source.feed.put_nowait(PodsUnavailable("gone"))
            await asyncio.sleep(3600)
            assert pods.addresses() == ["10.0.0.1:50053"]
            source.list_errors = []
            await asyncio.sleep(60)
            source.feed.put_nowait(PodEvent(PodChange.SET, "9", pod("b", ip="10.0.0.2")))
            await pods.changed()
            assert len(pods.addresses()) == 2

    simulate(story())
