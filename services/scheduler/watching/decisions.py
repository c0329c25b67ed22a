"""Makes the events about the inputs and decisions of scheduling cores, so that a recording can be
replayed.

The event of a request has no text and no tokens, only the data that the core uses. Tokens, scopes
of the prefix cache and grammars are replaced by numbers in the order of first appearance, which
only tell whether two of them are equal. The event of a call has the times that the core read from
its clock during the call.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from orcinus.v1 import watch_pb2

from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.watching.audience import Audience
from services.scheduler.watching.told_requests import ToldRequests

Thing = TypeVar("Thing", bound=Hashable)


class Clock:
    """A clock that keeps its readings while a watcher asks for decisions."""

    def __init__(self, audience: Audience, now: Callable[[], float] = time.monotonic) -> None:
        self._audience = audience
        self._now = now
        self._readings: list[float] = []

    def __call__(self) -> float:
        """Returns the time in seconds."""
        reading = self._now()
        if self._audience.wants_decisions:
            self._readings.append(reading)
        return reading

    def forget_readings(self) -> None:
        """Drops the kept readings."""
        self._readings.clear()

    def take_readings(self) -> list[float]:
        """Returns the kept readings, and drops them."""
        readings, self._readings = self._readings, []
        return readings


class Numbering(Generic[Thing]):
    """Gives numbers to things: 0 to the thing that appears first, 1 to the next new thing, and so
    on."""

    def __init__(self) -> None:
        self._numbers: dict[Thing, int] = {}

    def of(self, thing: Thing) -> int:
        """Returns the number of a thing, which is a new number if the thing has not appeared
        before."""
        return self._numbers.setdefault(thing, len(self._numbers))

    def of_all(self, things: Iterable[Thing]) -> list[int]:
        """Returns the number of each thing, as `of` does."""
        numbers = self._numbers
        return [numbers.setdefault(thing, len(numbers)) for thing in things]


class Decisions:
    """Sends watchers an event about each call of a scheduling core of this process: a decision."""

    def __init__(self, audience: Audience, told: ToldRequests) -> None:
        self.clock = Clock(audience)
        """The clock of all cores."""
        self.n_cores = 0
        """Number of cores that this process has created."""
        self.core_numbers: WeakKeyDictionary[Scheduler, int] = WeakKeyDictionary()
        """The number of each core that is still in use."""
        self._audience = audience
        self._told = told
        self._tokens: Numbering[int] = Numbering()
        self._scopes: Numbering[bytes] = Numbering()
        self._grammars: Numbering[bytes] = Numbering()

    @property
    def are_wanted(self) -> bool:
        """Whether a watcher has asked for decisions."""
        return self._audience.wants_decisions

    def begin(self) -> None:
        """Notes that a call of a core begins. Drops the earlier readings of the clock."""
        self.clock.forget_readings()

    def tell(self, core_number: int, **decision: Any) -> None:
        """Sends watchers the decision of a call that has ended. The keyword argument has the name
        of a field of `DecisionEvent`, and its value."""
        event = watch_pb2.DecisionEvent(
            core_number=core_number, clock_s=self.clock.take_readings(), **decision
        )
        self._audience.tell(watch_pb2.WatchEvent(decision=event))

    def number(self, request: Request) -> int:
        """Returns the number by which events name a request."""
        return self._told.number(request)

    def knows(self, request: Request) -> bool:
        """Returns whether a request has a number and has not ended."""
        return self._told.get(request) is not None

    def tokens(self, token_ids: Iterable[int]) -> list[int]:
        """Returns the numbers by which events name the tokens `token_ids`."""
        return self._tokens.of_all(token_ids)

    def grammar(self, digest: bytes) -> int:
        """Returns the number by which events name the grammar with the digest `digest`."""
        return self._grammars.of(digest)

    def submission(self, request: Request) -> watch_pb2.SubmissionDecision:
        """Returns the event of a new request, with the data that the core uses."""
        result = watch_pb2.SubmissionDecision(
            number=self.number(request),
            prompt_token_ids=self.tokens(request.prompt_token_ids),
            generated_token_ids=self.tokens(request.generated_token_ids),
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=self.tokens(sorted(request.stop_token_ids)),
            n_losses=request.n_losses,
            priority=request.priority,
            n_option_bytes=request.n_option_bytes,
            has_drafts=request.speculation is not None,
            has_prompt_logprobs=request.n_prompt_logprobs is not None,
            build=request.build,
            runs_whole=request.runs_whole,
        )
        if request.account is not None:
            result.account = request.account.name
            result.weight = request.account.limits.weight
        if request.cache_scope is not None:
            result.scope = self._scopes.of(request.cache_scope)
        if request.grammar_digest is not None:
            result.grammar = self.grammar(request.grammar_digest)
        return result
