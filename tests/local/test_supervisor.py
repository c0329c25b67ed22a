"""A service that dies or hangs is started again where it was, and not for ever."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import psutil
import pytest

from services.local.child import Child, ChildDied
from services.local.restart_limit import MAX_RESTARTS, RestartLimit
from services.local.supervisor import Supervisor
from tests.limits import HANG_S

pytestmark = pytest.mark.system


class Heard:
    """Everything that a supervisor says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()


@asynccontextmanager
async def supervised(
    then: str, *, has_spare: bool = False, spare: str = "waits"
) -> AsyncIterator[tuple[Supervisor, Heard]]:
    """A fake service that is looked after."""
    heard = Heard()
    supervisor = Supervisor(
        "fake",
        "tests.local.fake_service",
        {"address": "127.0.0.1:0", "then": then, "spare": spare, "unset": None},
        ready_keys=("ready",),
        on_message=lambda _: None,
        tell=heard.lines.append,
        give_up=heard.end.set_result,
        limit=RestartLimit(first_pause_s=0.01),
        has_spare=has_spare,
    )
    await supervisor.start()
    try:
        yield supervisor, heard
    finally:
        await supervisor.stop()


async def next_child(supervisor: Supervisor, last: Child) -> Child:
    """Waits for the child after `last` to be ready."""
    async with asyncio.timeout(HANG_S):
        while supervisor.child is last:
            await asyncio.sleep(0.02)
        await supervisor.child.wait_for("ready")
        return supervisor.child


async def test_a_child_that_is_killed_comes_back_at_its_address() -> None:
    async with supervised("serve") as (supervisor, heard):
        supervisor.begin_restarts()
        first = supervisor.child
        address = await first.wait_for("address")
        await first.wait_for("ready")
        os.kill(first.said["pid"], signal.SIGKILL)
        second = await next_child(supervisor, first)
        assert second.said["address"] == address
        assert second.said["pid"] != first.said["pid"]
        assert heard.lines == ["fake was killed by SIGKILL; starting it again"]
        assert not heard.end.done()
    assert not psutil.pid_exists(second.said["pid"])


async def test_a_spare_takes_over_at_the_address_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.local.spare.PAUSE_S", 0.05)
    async with supervised("serve", has_spare=True) as (supervisor, heard):
        supervisor.begin_restarts()
        address = await supervisor.child.wait_for("address")
        used: list[int] = []
        for _ in range(2):
            first, spare = supervisor.child, await next_spare(supervisor, used)
            await first.wait_for("ready")
            os.kill(first.pid, signal.SIGKILL)
            second = await next_child(supervisor, first)
            assert (second.pid, second.said["address"]) == (spare, address)
            used.append(spare)
        assert heard.lines == ["fake was killed by SIGKILL; its spare takes over"] * 2
        last = await next_spare(supervisor, used)
    assert not psutil.pid_exists(last)


async def test_a_spare_that_ends_is_replaced_and_is_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.local.spare.PAUSE_S", 0.05)
    async with supervised("serve", has_spare=True) as (supervisor, heard):
        supervisor.begin_restarts()
        first = await next_spare(supervisor, [])
        os.kill(first, signal.SIGKILL)
        second = await next_spare(supervisor, [first])
        os.kill(supervisor.child.pid, signal.SIGKILL)
        await next_child(supervisor, supervisor.child)
        assert supervisor.child.pid == second
        assert heard.lines == ["fake was killed by SIGKILL; its spare takes over"]


@pytest.mark.thorough
async def test_spares_that_end_before_they_wait_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.local.spare.PAUSE_S", 0.01)
    async with supervised("serve", has_spare=True, spare="dies") as (supervisor, heard):
        supervisor.begin_restarts()
        async with asyncio.timeout(HANG_S):
            while not heard.lines:
                await asyncio.sleep(0.02)
        assert heard.lines == ["fake has no spare any more, since its spares end before they wait"]
        first = supervisor.child
        os.kill(first.pid, signal.SIGKILL)
        await next_child(supervisor, first)
        assert heard.lines[1:] == ["fake was killed by SIGKILL; starting it again"]


async def next_spare(supervisor: Supervisor, known: Sequence[int]) -> int:
    """Waits for a spare that is none of the `known` processes, and returns its process."""
    async with asyncio.timeout(HANG_S):
        while (spare := supervisor._spare.process) is None or spare.pid in known:
            await asyncio.sleep(0.02)
    return spare.pid


@pytest.mark.parametrize(
    "stops_process",
    [
        pytest.param(False, id="its-loop-hangs", marks=pytest.mark.thorough),
        pytest.param(True, id="it-is-stopped"),
    ],
)
async def test_a_child_that_hangs_is_ended_and_comes_back(stops_process: bool) -> None:
    async with supervised("serve" if stops_process else "hang") as (supervisor, heard):
        supervisor.begin_restarts()
        first = supervisor.child
        pid = await first.wait_for("pid")
        await first.wait_for("ready")
        if stops_process:
            os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(HANG_S):
            assert await first.obituary() == "fake hung"
        await next_child(supervisor, first)
        assert heard.lines == ["fake hung; starting it again"]


async def test_a_child_that_dies_at_first_start_is_not_started_again() -> None:
    async with supervised("die") as (supervisor, heard):
        with pytest.raises(ChildDied):
            await supervisor.child.wait_for("ready")
        assert await asyncio.wait_for(heard.end, HANG_S) == "fake exited with status 3"
        assert heard.lines == []


async def test_a_child_says_last_why_it_ends() -> None:
    async with supervised("give-up") as (_, heard):
        assert await asyncio.wait_for(heard.end, HANG_S) == "fake: address: why not"


async def test_a_child_that_dies_as_often_as_it_serves_comes_back_each_time() -> None:
    async with supervised("serve") as (supervisor, heard):
        supervisor.begin_restarts()
        child = supervisor.child
        for _ in range(MAX_RESTARTS + 1):
            await child.wait_for("ready")
            os.kill(child.said["pid"], signal.SIGKILL)
            child = await next_child(supervisor, child)
        assert len(heard.lines) == MAX_RESTARTS + 1
        assert not heard.end.done()


async def test_a_child_that_never_becomes_ready_stays_dead() -> None:
    async with supervised("die") as (supervisor, heard):
        supervisor.begin_restarts()
        reason = await asyncio.wait_for(heard.end, HANG_S)
        assert reason == "fake exited with status 3 after 5 restarts"
        assert heard.lines == [
            f"fake exited with status 3; starting it again ({n} of 5)" for n in range(1, 6)
        ]


async def test_a_child_that_is_ready_no_more_when_it_ends_counts_as_failed() -> None:
    async with supervised("lose") as (supervisor, heard):
        supervisor.begin_restarts()
        reason = await asyncio.wait_for(heard.end, HANG_S)
        assert reason == "fake exited with status 5 after 5 restarts"


def test_a_service_that_had_served_is_started_again_at_once_however_often_it_dies() -> None:
    limit = RestartLimit()
    pauses = {limit.pause_s(was_ready=True) for _ in range(3 * MAX_RESTARTS)}
    assert pauses == {0.0}


def test_a_service_that_does_not_become_ready_pauses_for_longer_each_time_and_then_ends() -> None:
    limit = RestartLimit()
    pauses = [limit.pause_s(was_ready=False) for _ in range(MAX_RESTARTS + 1)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, None]


def test_attempts_that_failed_are_forgotten_when_the_service_has_been_ready() -> None:
    limit = RestartLimit()
    for _ in range(3):
        for _ in range(MAX_RESTARTS - 1):
            assert limit.pause_s(was_ready=False) is not None
        assert limit.pause_s(was_ready=True) == 0.0
