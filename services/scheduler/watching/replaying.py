"""Repeats the calls of a recording on new scheduling cores, and compares the selected batches.

The cores get all recorded inputs again: requests, results, losses, readings of the clock. Their
batches must be equal to the recorded batches. The cores of several pipelines share one pool, and
their calls are repeated in the order in which they were made. So each waiting request is admitted
by the same pipeline as in the recording. A recording has numbers instead of tokens; equal
numbers stand for equal tokens, which is enough for drafts and for the prefix cache.
"""

from array import array
from collections.abc import Sequence

from orcinus.v1 import watch_pb2

from services.common.errors import OrcinusError
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.request import TOKEN_ID, Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.speculation import Speculation
from services.scheduler.watching.core_facts import CoreFacts, core_of, order_of
from services.scheduler.watching.selections import selection_of

N_DIGITS = 255
"""Number of values that the first three bytes of a replayed token id may have, from 0. The last
byte always has the value `N_DIGITS`, which no other byte has."""

MAX_OPTION_BYTES = 2**24
"""Maximum size of a request's sampling options in bytes; a message of a frontend is never that
large."""


class NotReplayable(Exception):
    """Raised when a recording lacks data that a replay needs; the message says which data."""


class Difference(Exception):
    """Raised when a replay differs from the recording; the message says where."""


class ReplayClock:
    """A clock that returns recorded readings."""

    def __init__(self) -> None:
        self._readings: list[float] = []

    def set(self, readings: Sequence[float]) -> None:
        """Sets the readings that the next calls return. After the last one, calls raise
        `Difference`."""
        self._readings = list(reversed(readings))

    def __call__(self) -> float:
        """Returns the next reading.

        Raises:
            Difference: no reading is left.
        """
        if not self._readings:
            raise Difference("the replay looks at the clock, and the recording does not")
        return self._readings.pop()


class ReplayPool(RequestPool):
    """The `RequestPool` of one pipeline in a replay. Requests expire when they expired in the
    recording, whatever the time."""

    expiring: Sequence[Request] = ()
    """The requests that the next call of `expired` returns."""

    def expired(self, now: float) -> list[Request]:
        """Returns the requests that expired in the recording. `now` is not used."""
        return list(self.expiring)


class Replay:
    """Repeats the calls of a recording. It has a core for each epoch of each pipeline, and all
    requests so far."""

    def __init__(self) -> None:
        self.n_batches = 0
        """Number of batches that were equal to the recorded batches."""
        self._clock = ReplayClock()
        self._cores: list[Scheduler] = []
        self._pools: dict[int, ReplayPool] = {}  # by the number of the pipeline
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}

    def take(self, decision: watch_pb2.DecisionEvent) -> None:
        """Repeats the call that a recorded decision describes.

        Raises:
            Difference: the core refuses the call or selects another batch.
            NotReplayable: the recording has no core for the call, or lacks a request.
        """
        kind = decision.WhichOneof("decision")
        if kind == "core":
            self._clock.set(decision.clock_s)
            self._add_core(decision.core)
            return
        if decision.core_number >= len(self._cores):
            raise NotReplayable("it does not begin with the first decision")
        self._clock.set(decision.clock_s)
        core = self._cores[decision.core_number]
        try:
            self._repeat(core, decision, kind)
        except (OrcinusError, ValueError, LookupError) as error:
            raise Difference(f"{kind}: the core refuses it: {error}") from error

    def _repeat(self, core: Scheduler, decision: watch_pb2.DecisionEvent, kind: str | None) -> None:
        match kind:
            case "submission":
                core.submit(self._new_request(decision.submission))
            case "cancellation" | "surrender":
                self._end(core, decision)
            case "expiry":
                self._expire(core, decision.expiry)
            case "due_grammar" | "grammar":
                _prepare_grammar(core, decision, kind)
            case "selection":
                self._select(core, decision.selection)
            case "result":
                result = decision.result
                tokens = _tokens(result.token_ids)
                core.apply(result.iteration, tokens, cut=result.cut, broken=result.broken)
            case "resumption" | "adoption":
                self._open(core, decision)
            case "suspension" | "drain" | "lateness":
                _leave(core, decision, kind)
            case "overhead_tokens":
                core.learn_overhead(decision.overhead_tokens)
            case _:
                raise NotReplayable("it has a decision that this version does not know")

    def _open(self, core: Scheduler, decision: watch_pb2.DecisionEvent) -> None:
        if decision.HasField("resumption"):
            core.resume(self._cores[decision.resumption.core_number])
        else:
            core.adopt()

    def _end(self, core: Scheduler, decision: watch_pb2.DecisionEvent) -> None:
        if decision.HasField("cancellation"):
            core.cancel(self._request(decision.cancellation))
        else:
            core.give_up(self._request(decision.surrender), "it was given up")

    def _expire(self, core: Scheduler, expiry: watch_pb2.ExpiryDecision) -> None:
        expiring = [self._request(number) for number in expiry.numbers]
        for pool in self._pools.values():
            pool.expiring = expiring
        core.expire(0.0)

    def _add_core(self, text: str) -> None:
        try:
            facts = CoreFacts.model_validate_json(text)
            if facts.is_first != (not self._cores):
                raise NotReplayable("it does not begin with the first decision")
            self._cores.append(core_of(facts, self._pool_of(facts)))
        except ValueError as error:
            raise NotReplayable(f"its core is not one of this version: {error}") from error

    def _pool_of(self, facts: CoreFacts) -> ReplayPool:
        """Returns the `RequestPool` of a core's pipeline, and creates it if the pipeline has had no
        core before. The pools of all pipelines share the waiting requests."""
        pool = self._pools.get(facts.pipeline)
        if pool is None:
            first = next(iter(self._pools.values()), None)
            pool = self._pools[facts.pipeline] = ReplayPool(
                max_requests=facts.max_requests,
                max_tokens=facts.max_tokens,
                order=order_of(facts, self._clock) if first is None else None,
                shared=None if first is None else first.shared,
            )
        return pool

    def _select(self, core: Scheduler, recorded: watch_pb2.SelectionDecision) -> None:
        core.take_preempted()
        replayed = selection_of(core.select(), self._numbers.__getitem__)
        if replayed == recorded:
            self.n_batches += recorded.iteration > 0
            return
        for field in recorded.DESCRIPTOR.fields:
            there, here = getattr(recorded, field.name), getattr(replayed, field.name)
            if there != here:
                iteration = recorded.iteration or replayed.iteration
                there, here = (list(one) if field.is_repeated else one for one in (there, here))
                raise Difference(
                    f"iteration {iteration}: {field.name} is {there} in the recording and {here} "
                    "in the replay"
                )

    def _request(self, number: int) -> Request:
        request = self._requests.get(number)
        if request is None:
            raise NotReplayable(f"request {number} never came")
        return request

    def _new_request(self, told: watch_pb2.SubmissionDecision) -> Request:
        if told.n_option_bytes > MAX_OPTION_BYTES:
            raise NotReplayable(f"request {told.number} has {told.n_option_bytes} bytes of options")
        account = None
        if told.HasField("account"):
            account = AccountUse(AccountLimits(weight=told.weight), name=told.account)
        request = Request(
            request_id=_request_id(told.number),
            prompt_token_ids=_tokens(told.prompt_token_ids),
            max_new_tokens=told.max_new_tokens,
            runs_whole=told.runs_whole,
            sampling=bytes(told.n_option_bytes),
            grammar_digest=_name(told.grammar) if told.HasField("grammar") else None,
            n_prompt_logprobs=0 if told.has_prompt_logprobs else None,
            stop_token_ids=frozenset(_tokens(told.stop_token_ids)),
            speculation=Speculation() if told.has_drafts else None,
            account=account,
            priority=told.priority,
            generated_token_ids=_tokens(told.generated_token_ids),
            n_losses=told.n_losses,
            build=told.build,
            cache_scope=_name(told.scope) if told.HasField("scope") else None,
        )
        self._requests[told.number] = request
        self._numbers[request] = told.number
        return request


def _leave(core: Scheduler, decision: watch_pb2.DecisionEvent, kind: str) -> None:
    """Repeats a recorded call by which requests left a pipeline, because the pipeline was lost, was
    late or had to end."""
    if kind == "drain":
        core.drain(is_last=decision.drain.is_last)
    elif kind == "lateness":
        core.release_late()
    else:
        suspension = decision.suspension
        core.suspend(suspension.iteration, is_by_itself=suspension.is_by_itself)


def _prepare_grammar(core: Scheduler, decision: watch_pb2.DecisionEvent, kind: str) -> None:
    """Repeats a decision about a grammar: that the ranks must compile it, or that they have
    compiled it or could not."""
    if kind == "grammar":
        failure = "it failed" if decision.grammar.has_failed else ""
        core.note_grammar(_name(decision.grammar.number), failure)
        return
    due, recorded = core.next_grammar(), _name(decision.due_grammar)
    if due is None or due.digest != recorded:
        here = "none" if due is None else due.digest.decode()
        raise Difference(f"grammar {recorded.decode()} is due in the recording, here {here}")


def _request_id(number: int) -> RequestId:
    return RequestId(str(number))


def _name(number: int) -> bytes:
    return str(number).encode()


def _tokens(numbers: Sequence[int]) -> "array[int]":
    return array(TOKEN_ID, [_token(number) for number in numbers])


def _token(number: int) -> int:
    """Returns the token id that stands for the token with this number in a recording.

    The drafter searches for equal tokens byte by byte. To make each match begin and end between two
    tokens, the last byte of a token id always has a value that no other byte has.
    """
    number, low = divmod(number, N_DIGITS)
    high, middle = divmod(number, N_DIGITS)
    return int.from_bytes((low, middle, high % N_DIGITS, N_DIGITS), "little")
