"""Keeps a service running: starts a new child process when the present one dies or hangs.

The new child gets the same addresses as the earlier one, because the other services use them. A
child that was ready is replaced at once, or after a pause if a spare worker takes over its stage.
If children end several times in a row before they are ready, something is wrong with the service:
the pauses before the next starts become longer, and at last it is not started any more.

A spare of a service is a process that has started up and waits. It takes over when the child ends,
so that clients do not wait for a process to start.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from services.local.child import Child, OnMessage
from services.local.restart_limit import MAX_RESTARTS, RestartLimit
from services.local.spare import Spare

ADDRESS_OPTIONS = {
    "address": "address",
    "http": "http-address",
    "grpc": "grpc-address",
    "metrics": "metrics-address",
}
"""Names of the command-line options that set addresses, by the key under which a service reports
the address."""


class Supervisor:
    """Runs one service as a child process, and starts a new child when the present one ends."""

    def __init__(
        self,
        name: str,
        module: str,
        options: Mapping[str, object],
        *,
        ready_keys: Collection[str],
        on_message: OnMessage,
        tell: Callable[[str], None],
        give_up: Callable[[str], None],
        limit: RestartLimit,
        has_spare: bool = False,
    ) -> None:
        """A child is ready while a value that it has reported for one of `ready_keys` is true. With
        `has_spare`, a spare process is started when a child is ready, and takes over when the child
        ends. `tell` is called with a text about each restart. `give_up` is called with the reason
        when the service has ended and is not restarted."""
        self.child: Child
        self._restarts = False
        self._spare = Spare(
            name,
            partial(self._new_child, is_spare=True),
            is_wanted=lambda: self._is_ready,
            tell=tell,
            limit=RestartLimit(first_pause_s=limit.first_pause_s),
        )
        self._has_spare = has_spare
        self._name = name
        self._module = module
        self._options = dict(options)
        self._ready_keys = ready_keys
        self._on_message = on_message
        self._tell = tell
        self._give_up = give_up
        self._limit = limit
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None]

    async def start(self) -> Child:
        """Starts the first child, and a task that waits for its end. The child is restarted only
        after `begin_restarts` was called."""
        await self._start_child()
        self._task = asyncio.create_task(self._keep_running(), name=self._name)
        return self.child

    def begin_restarts(self) -> None:
        """From now on, starts a new child whenever the present one ends. The launcher calls this
        method once all services serve. A child that ends earlier is not restarted, because it would
        fail again."""
        self._restarts = True
        if self._has_spare:
            self._spare.begin()

    async def stop(self) -> None:
        """Ends the present child without starting another one."""
        self._stopping.set()
        await self._spare.stop()
        await self.child.stop()
        await self._task
        await self.child.stop()  # a child that was being started meanwhile

    async def _start_child(self) -> None:
        self.child = await self._new_child()

    async def _new_child(self, *, is_spare: bool = False) -> Child:
        arguments = [
            _argument(key, value) for key, value in self._options.items() if value is not None
        ]
        return await Child.start(
            self._name,
            self._module,
            arguments,
            on_message=self._note_message,
            is_spare=is_spare,
        )

    @property
    def _is_ready(self) -> bool:
        return any(self.child.said.get(key) for key in self._ready_keys)

    def _note_message(self, message: dict[str, Any]) -> None:
        """Keeps the addresses that a child reports, so that the next child gets the same ones."""
        for key, option in ADDRESS_OPTIONS.items():
            if message.get(key) is not None:
                self._options[option] = message[key]
        self._on_message(message)

    async def _keep_running(self) -> None:
        """Starts a new child whenever one ends, until the limit of restarts is reached or `stop` is
        called. If restarts have not begun, returns when the first child ends."""
        while True:
            reason = await self._end_of_child()
            if self._stopping.is_set():
                return
            if not self._restarts:
                self._give_up(reason)
                return
            was_ready = self._is_ready
            if was_ready and (spare := self._spare.take()) is not None:
                self.child = spare
                self._tell(f"{reason}; its spare takes over")
                continue
            pause_s = self._limit.pause_s(was_ready=was_ready)
            if pause_s is None:
                self._give_up(f"{reason} after {MAX_RESTARTS} restarts")
                return
            n_failed = self._limit.n_failed
            attempt = f" ({n_failed} of {MAX_RESTARTS})" if n_failed else ""
            self._tell(f"{reason}; starting it again{attempt}")
            if await self._is_stopped_within(pause_s):
                return
            try:
                await self._start_child()
            except OSError as error:
                self._give_up(f"{self._name} cannot be started again: {error}")
                return
            if self._stopping.is_set():
                return  # `stop` ends the new child, too

    async def _end_of_child(self) -> str:
        """Waits until the child ends, or kills it if it hangs. Returns the reason of the end as a
        sentence."""
        watching = asyncio.create_task(self.child.kill_when_hung())
        try:
            return await self.child.obituary()
        finally:
            watching.cancel()

    async def _is_stopped_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def _argument(key: str, value: object) -> str:
    """Returns a setting as an option of the command line. A boolean becomes a flag."""
    if isinstance(value, bool):
        return f"--{key}" if value else f"--no-{key}"
    return f"--{key}={value}"
