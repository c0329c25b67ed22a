"""Runs coroutines on a simulated clock that jumps to the next event, so that minutes pass in no
time."""

import asyncio
import selectors
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def simulate(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in simulated time. `asyncio.get_running_loop().time()` returns
    the simulated time.

    Raises:
        RuntimeError: all tasks wait, and no timer is left that could wake one of them.
    """
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)


class StoppableProcess:
    """Runs a coroutine that can be stopped at any time, as SIGSTOP stops a process. Results that
    arrive while the coroutine is stopped are delivered when it continues."""

    def __init__(self) -> None:
        self._is_running = asyncio.Event()
        self._is_running.set()

    def stop(self) -> None:
        """Stops the coroutine at its next await."""
        self._is_running.clear()

    def go_on(self) -> None:
        """Lets the coroutine continue."""
        self._is_running.set()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end and returns its result."""
        result: T = await _Steps(self._is_running, coroutine)
        return result


class _Steps:
    def __init__(self, is_running: asyncio.Event, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._is_running = is_running
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        error: BaseException | None = None
        try:
            while True:
                while not self._is_running.is_set():
                    try:
                        yield from self._is_running.wait().__await__()
                    except asyncio.CancelledError as cancellation:
                        error = cancellation
                try:
                    waits_for = steps.throw(error) if error else next(steps)
                except StopIteration as end:
                    return end.value
                try:
                    yield waits_for
                    error = None
                except asyncio.CancelledError as cancellation:
                    error = cancellation
        finally:
            self._coroutine.close()


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._selector_of_time = _Selector()
        super().__init__(self._selector_of_time)

    def time(self) -> float:
        return self._selector_of_time.now


class _Selector(selectors.SelectSelector):
    """A selector that advances the simulated time instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is going to happen any more")
        self.now += max(timeout, 0.0)
        return super().select(0)
