"""The watch over serving: what users feel, in simulated time."""

import asyncio
from dataclasses import dataclass, field

from services.common.serving import HELD_UP_S, SILENCE_LIMIT_S, ServingWatch
from tests.simulated_time import simulate


@dataclass
class Service:
    """A service that is watched, and the answers that were told."""

    trouble: str = ""
    n_waiting: int = 0
    held_up_s: float = 0.0
    told: list[bool] = field(default_factory=list)

    def watch(self) -> ServingWatch:
        loop = asyncio.get_running_loop()
        return ServingWatch(
            trouble=lambda: self.trouble,
            n_waiting=lambda: self.n_waiting,
            clock=lambda: loop.time() + self.held_up_s,
        )

    async def tell(self, is_serving: bool) -> None:
        self.told.append(is_serving)


def test_it_serves_while_nobody_waits() -> None:
    async def story() -> None:
        service = Service()
        watch = service.watch()
        watching = asyncio.create_task(watch.run(service.tell))
        await asyncio.sleep(100)
        assert watch.reason_against() == ""
        assert all(service.told)
        watching.cancel()

    simulate(story())


def test_it_says_for_how_long_there_has_been_trouble() -> None:
    async def story() -> None:
        service = Service()
        watch = service.watch()
        watching = asyncio.create_task(watch.run(service.tell))
        await asyncio.sleep(20)
        service.trouble = "no pipeline"
        assert watch.reason_against().startswith("no pipeline for")  # before anybody looks
        await asyncio.sleep(30)
        assert watch.reason_against() == "no pipeline for 30 s"
        assert service.told[-1] is False
        service.trouble = ""
        await asyncio.sleep(1)
        assert watch.reason_against() == ""
        assert service.told[-1] is True
        watching.cancel()

    simulate(story())


def test_requests_that_wait_without_a_token_are_not_served() -> None:
    async def story() -> None:
        service = Service()
        watch = service.watch()
        watching = asyncio.create_task(watch.run(service.tell))
        await asyncio.sleep(100)
        service.n_waiting = 3
        for _ in range(10):
            await asyncio.sleep(SILENCE_LIMIT_S - 1)
            assert watch.reason_against() == ""
            watch.note_progress()
        await asyncio.sleep(SILENCE_LIMIT_S + 0.6)
        assert watch.reason_against() == "no token for 9 s while 3 requests wait"
        assert service.told[-1] is False
        watch.note_progress()
        assert watch.reason_against() == ""
        watching.cancel()

    simulate(story())


def test_a_loop_that_stands_still_does_not_serve_and_says_so_to_other_threads() -> None:
    async def story() -> None:
        service = Service()
        watch = service.watch()
        watching = asyncio.create_task(watch.run(service.tell))
        await asyncio.sleep(10)
        service.held_up_s = HELD_UP_S + 2.8  # nothing runs meanwhile
        assert watch.reason_against() == "this process has been held up for 6 s"
        assert all(service.told)
        await asyncio.sleep(2)
        assert service.told.count(False) == 1  # told once, after the loop runs again
        assert watch.reason_against() == ""
        assert service.told[-1] is True
        watching.cancel()

    simulate(story())
