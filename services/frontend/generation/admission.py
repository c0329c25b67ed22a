"""Admits calls to this process, whichever model they are for.

The limits here bound the memory of the process, so all models share them: the number of answers in
flight, and the memory budget. A process that stops refuses all new calls.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.common import errors
from services.frontend.api_keys import Account
from services.frontend.generation.call_resources import CallResources
from services.frontend.request.answers_in_flight import AnswersInFlight
from services.frontend.request.generation_request import GenerationRequest
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.refusals import Refusal, Refusals


class Admission:
    """Counts the calls that this process has admitted, and enforces the limits on all of them
    together."""

    def __init__(
        self,
        *,
        max_in_flight: int = 4096,
        max_answers_at_once: int = 32,
        budget: MemoryBudget | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        """`FrontendSettings` explains `max_in_flight` and `max_answers_at_once`. `budget` is the
        memory budget for clients' data."""
        self.refusals = Refusals() if refusals is None else refusals
        self.budget = budget or MemoryBudget(64 * 2**20, refusals=self.refusals)
        self.max_answers_at_once = max_answers_at_once
        self.n_in_flight = 0
        """Number of admitted answers that no scheduler has ended. Answers that wait for other
        answers of the same call do not count."""
        self.is_leaving = False
        """Whether load balancers should send requests to other frontends."""
        self.is_stopping = False
        """Whether new calls are refused."""
        self._max_in_flight = max_in_flight
        self._replaying = asyncio.Lock()  # tokens of one resumption are replayed at a time
        self._n_calls = 0  # number of calls that have not ended for their clients
        self._idle = asyncio.Event()
        self._idle.set()

    def leave(self) -> None:
        """Makes this frontend unready, to have new requests sent to other frontends. Requests that
        still arrive here are served."""
        self.is_leaving = True

    def refuse_new(self) -> None:
        """Refuses new requests and makes this frontend unready. Requests that run, or that wait for
        a pipeline, continue."""
        self.is_leaving = self.is_stopping = True

    async def wait_idle(self) -> None:
        """Waits until no call runs."""
        await self._idle.wait()

    def check_room(self, n_answers: int = 1) -> None:
        """Checks that the limit on answers in flight allows `n_answers` more.

        Raises:
            PoolFull: too many answers are in flight.
            Unavailable: this process is stopping.
        """
        if self.is_stopping:
            raise errors.Unavailable("the server is stopping")
        if self.n_in_flight + n_answers > self._max_in_flight:
            self.refusals[Refusal.IN_FLIGHT] += 1
            raise errors.PoolFull("too many requests")

    @contextmanager
    def admitted(self, request: GenerationRequest, account: Account) -> Iterator[CallResources]:
        """Counts a call as admitted while the context is open, and yields the resources that the
        call may use.

        Raises:
            InvalidRequest: the call asks for more answers than may ever be in flight.
            PoolFull: there are too many calls at once.
            Unavailable: this process is stopping.
        """
        self.check_room(0)
        n_answers = request.n_answers
        if n_answers > self._max_in_flight:
            self.refusals[Refusal.IN_FLIGHT] += 1
            raise errors.InvalidRequest(
                request.n_answers_field,
                f"asks for {n_answers} answers at once; {self._max_in_flight} can be in the making",
            )
        n_counted = min(n_answers, self.max_answers_at_once)

        with account.in_flight(request) as of_account:

            def release(n_ended: int) -> None:
                nonlocal n_answers, n_counted
                n_answers -= n_ended
                self.n_in_flight -= max(0, n_counted - n_answers)
                n_counted = min(n_counted, n_answers)
                of_account.end(n_ended)

            self.check_room(n_counted)
            with self.budget.share(request.n_bytes) as share:
                self.n_in_flight += n_counted
                self._n_calls += 1
                self._idle.clear()
                try:
                    with AnswersInFlight(n_answers, release) as in_flight:
                        yield CallResources(
                            in_flight=in_flight,
                            share=share,
                            budget=self.budget,
                            refusals=self.refusals,
                            replaying=self._replaying,
                            max_at_once=self.max_answers_at_once,
                            account=account.to_proto(),
                        )
                finally:
                    self._end_call()

    def _end_call(self) -> None:
        self._n_calls -= 1
        if self._n_calls == 0:
            self._idle.set()
