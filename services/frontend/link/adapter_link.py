"""The frontend's part in loading adapters: keeps the list of loaded adapters, and sends commands to
the scheduler.

The frontend sends its list to each scheduler to which it connects, before it sends requests. It
changes its list whenever the scheduler reports a change. So adapters stay loaded when another
scheduler takes over.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping

from orcinus.v1 import scheduler_pb2
from orcinus.v1.scheduler_pb2 import AdapterOutcome

from services.common import errors
from services.common.adapter_list import AdapterList
from services.common.adapter_list_proto import from_proto, to_proto

ANSWER_LIMIT_S = 120.0
"""Seconds for which a client waits for the answer to a command. It is longer than the scheduler's
own limit."""

LOST = "the scheduler was lost; try again"


class AdapterLink:
    """Keeps the list of loaded adapters, and the commands that the scheduler has not answered
    yet."""

    def __init__(
        self,
        send: Callable[[scheduler_pb2.ConnectRequest], None],
        on_change: Callable[[Mapping[str, str]], None],
        *,
        limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        """`send` sends a message to the scheduler. `on_change` is called when the list of loaded
        adapters changes, with the digest of each adapter, keyed by the adapter's name."""
        self._send = send
        self._on_change = on_change
        self._limit_s = limit_s
        self._list = AdapterList()
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._has_leader = False

    def open(self) -> None:
        """Sends the list of adapters to a scheduler that has been found. Must be called before any
        request is sent to this scheduler."""
        self._has_leader = True
        if entries := self._list.entries:
            self._send(scheduler_pb2.ConnectRequest(adapters=to_proto(entries)))

    def lose(self) -> None:
        """Ends all unanswered commands with the error Unavailable, because the scheduler is
        lost."""
        self._has_leader = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(errors.Unavailable(LOST))

    def take(self, response: scheduler_pb2.ConnectResponse) -> None:
        """Applies the changes of the list, and the answers to commands, that a message of the
        scheduler has."""
        if response.HasField("adapters") and self._list.merge(from_proto(response.adapters)):
            self._on_change(self._list.digests)
        for answer in response.adapter_answers:
            waiting = self._waiting.get(answer.command_id)
            if waiting is None or waiting.done():
                continue
            error = _error_of(answer)
            if error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(error)

    async def load(self, name: str, source: str) -> None:
        """Asks the scheduler to load an adapter, and returns when requests may use the adapter.

        Raises:
            InvalidRequest: the adapter cannot be loaded; the error names the field.
            PoolFull: there are too many adapters, or too many are being loaded.
            Unavailable: there is no scheduler, or the adapter was not loaded in time.
        """
        await self._command(name, source)

    async def unload(self, name: str) -> None:
        """Asks the scheduler to unload an adapter, and returns when no later request can use the
        adapter.

        Raises:
            InvalidRequest: the adapter cannot be unloaded; the error names the field.
            UnknownAdapter: there is no adapter of this name.
            Unavailable: there is no scheduler, or it did not answer in time.
        """
        await self._command(name, "")

    async def _command(self, name: str, source: str) -> None:
        if not self._has_leader:
            raise errors.Unavailable("no scheduler at the moment; try again")
        command_id = str(next(self._numbers))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[command_id] = answer
        command = scheduler_pb2.AdapterCommand(command_id=command_id, name=name, source=source)
        self._send(scheduler_pb2.ConnectRequest(adapter_command=command))
        try:
            async with asyncio.timeout(self._limit_s):
                await answer
        except TimeoutError:
            raise errors.Unavailable("the scheduler did not answer in time") from None
        finally:
            del self._waiting[command_id]


def _error_of(answer: scheduler_pb2.AdapterAnswer) -> errors.OrcinusError | None:
    """Returns the error that a client gets for the scheduler's answer to a command. Returns None if
    the command was carried out."""
    if answer.outcome == AdapterOutcome.ADAPTER_OUTCOME_DONE:
        return None
    if answer.outcome == AdapterOutcome.ADAPTER_OUTCOME_INVALID:
        return errors.InvalidRequest(answer.field, answer.message)
    if answer.outcome == AdapterOutcome.ADAPTER_OUTCOME_UNKNOWN:
        return errors.UnknownAdapter(answer.field, answer.message)
    if answer.outcome == AdapterOutcome.ADAPTER_OUTCOME_FULL:
        return errors.PoolFull(answer.message)
    return errors.Unavailable(answer.message or LOST)
