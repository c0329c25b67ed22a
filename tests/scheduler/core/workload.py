"""Random requests for the scheduler's tests, and a driver that takes the place of a perfect
engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from services.scheduler.core.batch import Batch, Span, Update
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.core.drafting.drafter import Drafter
from services.scheduler.core.memory.expected_use import ExpectedUse
from services.scheduler.core.memory.kv_groups import ONE_GROUP, BlockGroups
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.order.order import Order
from services.scheduler.core.policies import Policy
from services.scheduler.core.policies.orca import OrcaPolicy
from services.scheduler.core.request import Request, RequestId
from services.scheduler.core.request_pool import RequestPool
from services.scheduler.core.scheduler import Scheduler

STOP_TOKEN = 7
PLAIN_TOKEN = 1


@dataclass(frozen=True)
class Arrival:
    """A request that will arrive: its turn, its lengths, and the number of iterations after which
    it stops."""

    turn: int
    n_prompt: int
    max_new_tokens: int
    n_iterations: int
    cancelled_after: int | None = None
    client: str = ""
    """Name of the client, or empty for a request without a client. The name contains the client's
    weight: `b2` has the weight 2."""
    priority: int = 0
    scope: bytes = b""

    @property
    def max_tokens(self) -> int:
        return self.n_prompt + self.max_new_tokens


@st.composite
def arrivals(
    draw: st.DrawFn,
    *,
    with_cancellations: bool = False,
    clients: Sequence[str] = ("",),
    priorities: Sequence[int] = (0,),
    n_requests: int = 24,
) -> list[Arrival]:
    """Returns up to `n_requests` random requests, ordered by turn. Several arrive in most turns."""
    cancellations = st.none() | st.integers(0, 12) if with_cancellations else st.none()
    result = []
    for _ in range(draw(st.integers(1, n_requests))):
        max_new_tokens = draw(st.integers(1, 9))
        result.append(
            Arrival(
                turn=draw(st.integers(0, 12)),
                n_prompt=draw(st.integers(1, 12)),
                max_new_tokens=max_new_tokens,
                n_iterations=draw(st.integers(1, max_new_tokens)),
                cancelled_after=draw(cancellations),
                client=draw(st.sampled_from(clients)),
                priority=draw(st.sampled_from(priorities)),
            )
        )
    return sorted(result, key=lambda arrival: arrival.turn)


def build(
    *,
    max_batch_size: int,
    n_blocks: int,
    block_size: int,
    pipeline_depth: int,
    token_hand_off: bool = False,
    policy: Policy | None = None,
    order: Order | None = None,
    has_prefix_cache: bool = False,
    expected_use: ExpectedUse | None = None,
    drafter: Drafter | None = None,
    max_rows: int | None = None,
    groups: BlockGroups = ONE_GROUP,
) -> Scheduler:
    """Returns a scheduler. By default it has the policy and the order of the paper."""
    return Scheduler(
        RequestPool(max_requests=1000, order=order),
        KVManager(
            n_blocks=n_blocks,
            block_size=block_size,
            has_prefix_cache=has_prefix_cache,
            expected_use=expected_use,
            max_rows=max_rows,
            groups=groups,
        ),
        policy=policy or OrcaPolicy(max_batch_size=max_batch_size),
        pipeline_depth=pipeline_depth,
        token_hand_off=token_hand_off,
        drafter=drafter,
    )


def request_for(index: int, arrival: Arrival) -> Request:
    """Returns the request of an arrival. Its id is the index of the arrival."""
    return Request(
        request_id=RequestId(str(index)),
        prompt_token_ids=[PLAIN_TOKEN] * arrival.n_prompt,
        max_new_tokens=arrival.max_new_tokens,
        stop_token_ids=frozenset({STOP_TOKEN}),
        priority=arrival.priority,
        cache_scope=arrival.scope,
    )


def weight_of(client: str) -> float:
    """Returns the weight of a client, which is part of the client's name."""
    return float(client.lstrip("abcdefgh") or 1)


@dataclass
class Driver:
    """Submits arrivals turn by turn and returns batches in the order in which they were sent."""

    scheduler: Scheduler
    arrivals: list[Arrival]
    turn: int = 0
    requests: dict[int, Request] = field(default_factory=dict)
    in_flight: list[Batch] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    account: AccountUse | None = None
    accounts: dict[str, AccountUse] = field(default_factory=dict)
    """Accounts of the clients that have names, by name."""

    @property
    def is_done(self) -> bool:
        return len(self.requests) == len(self.arrivals) and not len(self.scheduler.pool)

    def arrive(self) -> None:
        """Submits the requests that arrive in this turn, cancels those that are cancelled in it,
        and goes on to the next turn."""
        for index, arrival in enumerate(self.arrivals):
            if arrival.turn == self.turn:
                self.requests[index] = request_for(index, arrival)
                self.requests[index].account = self._account_of(arrival.client)
                self.scheduler.submit(self.requests[index])
        for index, request in self.requests.items():
            arrival = self.arrivals[index]
            if arrival.cancelled_after == self.turn - arrival.turn:
                self.updates += self.scheduler.cancel(request)
        self.turn += 1

    def select(self) -> Batch | None:
        """Asks the scheduler for a batch, and returns it as a batch in flight. Returns None if
        there is none."""
        batch = self.scheduler.select()
        if batch is not None:
            self.in_flight.append(batch)
        return batch

    def return_oldest(self) -> None:
        """Returns the tokens of the oldest batch in flight to the scheduler."""
        batch = self.in_flight.pop(0)
        tokens = [self._token(span) for span in batch.spans if span.is_sampled]
        self.updates += self.scheduler.apply(batch.iteration, tokens)

    def _account_of(self, client: str) -> AccountUse | None:
        if not client:
            return self.account
        limits = AccountLimits(weight=weight_of(client))
        return self.accounts.setdefault(client, AccountUse(limits, name=client))

    def _token(self, span: Span) -> int:
        arrival = self.arrivals[int(span.request.request_id)]
        n_generated = span.start_position + span.n_tokens - arrival.n_prompt + 1
        return STOP_TOKEN if n_generated == arrival.n_iterations else PLAIN_TOKEN
