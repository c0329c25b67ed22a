"""Runs scheduling cores on the decisions of a recording, and compares their batches.

Everything that came from outside is given to the cores again: requests, results, losses, the time.
Their decisions must be equal. Recorded tokens are numbers, whose equality is enough for drafts and
for the prefix cache.
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
"""Number of values of a byte of a token; one more value marks the last byte of each token."""

MAX_OPTION_BYTES = 2**24
"""Maximum bytes of a request's options, more than a frontend's message may have."""


class NotReplayable(Exception):
    """The recording lacks something that a replay needs; the message says what."""


class Difference(Exception):
    """The replay differs from the recording; the message says where."""


class ReplayClock:
    """A clock that shows the recorded readings."""

    def __init__(self) -> None:
        self._readings: list[float] = []

    def set(self, readings: Sequence[float]) -> None:
        """Shows these readings and then no others."""
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
    """A pool in which requests expire when the recording says so."""

    expiring: Sequence[Request] = ()
    """The requests that expire in the next call."""

    def expired(self, now: float) -> list[Request]:
        """Returns the requests that expired in the recording, whatever the time."""
        return list(self.expiring)


class Replay:
    """The cores of a recording, one after the other, and their requests."""

    def __init__(self) -> None:
        self.n_batches = 0
        """Number of batches that were equal."""
        self._clock = ReplayClock()
        self._cores: list[Scheduler] = []
        self._pool: ReplayPool
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}

    def take(self, decision: watch_pb2.DecisionEvent) -> None:
        """Repeats a decision.

        Raises:
            Difference: the core decides something else.
            NotReplayable: there is no core, or a request is not known.
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
            case "cancellation":
                core.cancel(self._request(decision.cancellation))
            case "expiry":
                self._pool.expiring = [self._request(number) for number in decision.expiry.numbers]
                core.expire(0.0)
            case "selection":
                self._select(core, decision.selection)
            case "result":
                result = decision.result
                tokens = [_token(number) for number in result.token_ids]
                core.apply(result.iteration, tokens, cut=result.cut)
            case "adoption":
                core.adopt()
            case "suspension":
                core.suspend([RequestId(str(number)) for number in decision.suspension.culprits])
            case "surrender":
                core.give_up(self._request(decision.surrender), "it was given up")
            case "overhead_tokens":
                core.learn_overhead(decision.overhead_tokens)
            case _:
                raise NotReplayable("it has a decision that this version does not know")

    def _add_core(self, text: str) -> None:
        try:
            facts = CoreFacts.model_validate_json(text)
            if facts.is_first != (not self._cores):
                raise NotReplayable("it does not begin with the first decision")
            if not self._cores:
                self._pool = ReplayPool(
                    max_requests=facts.max_requests,
                    max_tokens=facts.max_tokens,
                    order=order_of(facts, self._clock),
                )
            self._cores.append(core_of(facts, self._pool))
        except ValueError as error:
            raise NotReplayable(f"its core is not one of this version: {error}") from error

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
            request_id=RequestId(str(told.number)),
            prompt_token_ids=_tokens(told.prompt_token_ids),
            max_new_tokens=told.max_new_tokens,
            sampling=bytes(told.n_option_bytes),
            grammar_digest=_name(told.grammar) if told.HasField("grammar") else None,
            n_prompt_logprobs=0 if told.has_prompt_logprobs else None,
            stop_token_ids=frozenset(_tokens(told.stop_token_ids)),
            speculation=Speculation() if told.has_drafts else None,
            account=account,
            priority=told.priority,
            generated_token_ids=_tokens(told.generated_token_ids),
            n_losses=told.n_losses,
            cache_scope=_name(told.scope) if told.HasField("scope") else None,
        )
        self._requests[told.number] = request
        self._numbers[request] = told.number
        return request


def _name(number: int) -> bytes:
    return str(number).encode()


def _tokens(numbers: Sequence[int]) -> "array[int]":
    return array(TOKEN_ID, [_token(number) for number in numbers])


def _token(number: int) -> int:
    """Returns a token id for the number of a token.

    Drafts look for equal tokens byte by byte. The last byte of each token, and no other byte, has a
    value of its own, so that only whole tokens are found.
    """
    number, low = divmod(number, N_DIGITS)
    high, middle = divmod(number, N_DIGITS)
    return int.from_bytes((low, middle, high % N_DIGITS, N_DIGITS), "little")
