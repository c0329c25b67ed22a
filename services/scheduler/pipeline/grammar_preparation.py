"""Lets the last stage of an epoch compile a grammar, while its iterations go on.

The scheduler chooses one grammar at a time (`core/admission/grammar_gate.py`). A call to the last
stage compiles the grammar, and returns when all ranks of the stage have it. If the ranks do not
compile the grammar in time, only the requests that use the grammar fail. If the last stage is gone,
the epoch is over: the requests wait, and the ranks of the next epoch compile the grammar again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import grpc
import grpc.aio
from orcinus.v1 import worker_pb2

from services.common import rpc
from services.scheduler.core.admission.grammar_gate import DueGrammar

PREPARE_LIMIT_S = 30.0
"""Seconds in which the ranks must compile a grammar. The longest grammar takes 1.6 s of processor
time, and more where iterations leave the processor little time."""

_LOSSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
"""Statuses of a call whose stage is gone or whose epoch is over."""


class Prepared(NamedTuple):
    """A grammar that the ranks have compiled, or could not compile."""

    digest: bytes
    failure: str
    """The reason why the ranks do not have the grammar; empty if they have it."""


class LastStage(Protocol):
    """The stub of the last stage, reduced to the method that compiles grammars."""

    def PrepareGrammar(
        self,
        request: worker_pb2.PrepareGrammarRequest,
        *,
        timeout: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> Awaitable[worker_pb2.PrepareGrammarResponse]:
        """Compiles a grammar on all ranks of the stage."""
        ...


class GrammarPreparation:
    """Lets the last stage of one epoch compile grammars, one at a time."""

    def __init__(
        self,
        last_stage: LastStage,
        epoch: int,
        *,
        wake: Callable[[], None],
        on_lost: Callable[[str], None],
        limit_s: float = PREPARE_LIMIT_S,
    ) -> None:
        """`wake` is called when `take` has something to return, and `on_lost` with the reason when
        the stage is gone. `limit_s` is the time limit for one grammar in seconds."""
        self._last_stage = last_stage
        self._epoch = epoch
        self._wake = wake
        self._on_lost = on_lost
        self._limit_s = limit_s
        self._task: asyncio.Task[Prepared | None] | None = None

    def begin(self, due: DueGrammar) -> None:
        """Begins the compilation of a grammar. The outcome for the previous grammar must have been
        taken."""
        self._task = asyncio.create_task(self._prepare(due), name="grammar preparation")
        self._task.add_done_callback(lambda _: self._wake())

    def take(self) -> Prepared | None:
        """Returns the grammar whose compilation has ended since the last call. Returns None if
        there is none. Raises an unexpected error of the compilation, which is a bug."""
        task = self._task
        if task is None or not task.done():
            return None
        self._task = None
        return task.result()

    async def close(self) -> None:
        """Cancels the compilation in progress, if there is one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _prepare(self, due: DueGrammar) -> Prepared | None:
        """Has the last stage compile a grammar, and returns the outcome. Returns None if the stage
        is gone."""
        request = worker_pb2.PrepareGrammarRequest(
            digest=due.digest, grammar=due.grammar.decode(), kept_digests=due.kept
        )
        try:
            response = await self._last_stage.PrepareGrammar(
                request, timeout=self._limit_s, metadata=rpc.epoch_metadata(self._epoch)
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in _LOSSES:
                self._on_lost(f"the last stage compiles no grammars: {error.details()}")
                return None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Prepared(due.digest, f"not compiled within {self._limit_s:g} s")
            return Prepared(due.digest, error.details() or error.code().name)
        return Prepared(due.digest, response.failure)


class NoGrammarPreparation:
    """Replacement for `GrammarPreparation` where no request has a grammar."""

    def begin(self, due: DueGrammar) -> None:
        """Does nothing, so that a request with a grammar waits until its deadline."""

    def take(self) -> Prepared | None:
        """Returns None: no grammar is compiled."""
        return None


NO_GRAMMAR_PREPARATION = NoGrammarPreparation()
