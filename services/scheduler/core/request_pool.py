"""The request pool: all requests in the system. The pool outlives epochs.

The pool limits the number of requests, and the number of tokens (prompts and outputs) that they may
reach together; so it also limits memory. Its `Order` decides which request comes first.

Each pipeline has its own `RequestPool`: the pool as this pipeline sees it. All pipelines share the
waiting requests (`shared_requests.py`), and `placement.py` decides which one admits a request.

Requests that can be in the next iteration are kept apart (`ready_requests.py`), so that the cost of
a selection does not depend on the number of other requests.

A waiting request may also be kept back by deadlines and admission control (`waiting.py`), by
caution after a loss (`suspects.py`), or by a grammar or an adapter that the ranks must have
(`gates.py`).
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from services.scheduler.core.admission.adapter_gate import AdapterGate
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.core.admission.gates import Gates
from services.scheduler.core.admission.grammar_gate import DueGrammar, GrammarGate
from services.scheduler.core.admission.no_control import NO_CONTROL, NoControl
from services.scheduler.core.admission.suspects import Suspects
from services.scheduler.core.admission.vector_gate import VectorGate
from services.scheduler.core.order.order import BatchLimits, Order
from services.scheduler.core.prefills import Prefills
from services.scheduler.core.ready_requests import ReadyRequests
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.shared_requests import SharedRequests

# Looking up an enum member takes as long as a method call, and would be done for each token.
_INITIATION = RequestState.INITIATION
_RUNNING = RequestState.RUNNING
_INCREMENT = RequestState.INCREMENT


class RequestPool:
    """Holds every request from its arrival to its end, in exactly one of its states."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int = sys.maxsize,
        order: Order | None = None,
        control: AdmissionControl | NoControl = NO_CONTROL,
        shared: SharedRequests | None = None,
    ) -> None:
        """`order` decides which request comes first; None means first come, first served, as in the
        paper. `control` is notified of requests that start or stop waiting. `shared` is the state
        that the pools of earlier pipelines share; `order` and `control` are then not used. Without
        it, this is the first pipeline."""
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.shared = shared or SharedRequests(order, control)
        """The state that all pipelines share: the waiting requests, and the accounts of the whole
        pool."""
        self.order = self.shared.order
        """Holds the requests in the state INITIATION, and chooses the next one."""
        self.waiting = self.shared.waiting
        """Deadlines and counts of the requests in the state INITIATION."""
        self._suspects = Suspects(self.shared.suspects, partial(self.shared.placement.fits, self))
        self.grammars = GrammarGate(self.shared.grammars)
        """The grammars that the ranks of this pipeline have compiled."""
        self.adapters = AdapterGate(self.shared.adapters)
        """The adapters that the ranks of this pipeline have loaded."""
        self.gates = Gates(self.grammars, self.adapters)
        self._admitted: dict[Request, None] = {}  # RUNNING or INCREMENT
        self.n_running_vectors = 0
        """Number of the admitted requests that want vectors (embeddings, scores)."""
        self._vectors = VectorGate()
        self._ready = ReadyRequests()  # the admitted requests that can run
        self.prefills = Prefills()  # the admitted requests with prompt tokens to select
        self.wake: Callable[[], None] = lambda: None
        """Function that is called when this pipeline may have another request to admit."""
        self.build = ""
        """Name of the build of the pipeline's workers. Pipelines of one build compute the same
        tokens."""
        self.is_late = False
        """Whether the pipeline is late. A late pipeline admits no request."""
        self.number = len(self.shared.pools)
        """Number of the pipeline, from 0."""
        self.shared.pools.append(self)

    def beside(self) -> "RequestPool":
        """Returns a `RequestPool` for a further pipeline. Both share the waiting requests."""
        return RequestPool(
            max_requests=self.max_requests, max_tokens=self.max_tokens, shared=self.shared
        )

    def __len__(self) -> int:
        return self.shared.n_requests

    def __iter__(self) -> Iterator[Request]:
        yield from self.order
        for pool in self.shared.pools:
            yield from pool.running

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait to run for the first time, or again."""
        return len(self.order)

    @property
    def n_free(self) -> int:
        """Number of further requests for which the pool has places."""
        return max(0, self.max_requests - len(self))

    @property
    def n_running(self) -> int:
        """Number of requests that the pipeline has admitted and that have not ended."""
        return len(self._admitted)

    @property
    def n_waiting_answers(self) -> int:
        """Number of the waiting requests that generate tokens: all but the requests for vectors."""
        return len(self.order) - self.shared.n_waiting_vectors

    @property
    def has_both_kinds(self) -> bool:
        """Whether both requests for vectors and requests for tokens run in this pipeline or wait.
        False while a suspect waits for its trial or is on trial."""
        n_vectors = self.n_running_vectors + self.shared.n_waiting_vectors
        return 0 < n_vectors < len(self._admitted) + len(self.order) and not self.has_trials

    @property
    def running(self) -> Collection[Request]:
        """Requests that the pipeline has admitted and that have not ended."""
        return self._admitted.keys()

    @property
    def ready_by_place(self) -> Sequence[Request]:
        """Snapshot of the admitted requests that can be in the next iteration, sorted by place."""
        return tuple(self._ready.by_place)

    @property
    def has_trials(self) -> bool:
        """Whether a suspect (`suspects.py`) waits for its trial, or is on trial here."""
        return self._suspects.are_in(self._admitted)

    def add(self, request: Request) -> None:
        """Adds a request to the pool.

        Raises:
            PoolFull: the pool has `max_requests` requests, or would exceed `max_tokens`.
        """
        self.shared.check_room(request, self.max_requests, self.max_tokens)
        self.shared.count(request, 1)
        request.arrival = self.shared.n_arrived
        request.begin_anew()
        self.shared.n_arrived += 1
        self.gates.add(request)
        self.order.add(request)
        self.waiting.add(request)
        self._suspects.add(request)
        self.shared.wake_all()

    def expired(self, now: float) -> list[Request]:
        """Returns the waiting requests whose deadlines have passed, or will pass before the
        requests can begin. The caller must remove these requests from the pool."""
        return self.waiting.expired(now)

    def candidates(self) -> Iterator[Request]:
        """Yields the requests that can be in the next iteration of this pipeline, in order. Leaves
        out waiting requests that another pipeline admits sooner. The pool must not change
        meanwhile."""
        passing = self._vectors.passing(self.gates.passing(self.selectable()))
        return self.shared.placement.passing(self, passing)

    def may_admit(self, request: Request) -> bool:
        """Returns whether the pipeline may admit a waiting request: the pipeline is not late, its
        ranks have the request's grammar and adapter, and no other pipeline is to admit the
        request."""
        if self.is_late or not self.gates.passes(request):
            return False
        return self.shared.placement.is_for(self, request)

    def selectable(self) -> Iterator[Request]:
        """Yields the requests of `candidates`, and also those that their grammars, their adapters,
        the limit on vectors or another pipeline keep out of the next iteration."""
        if self.is_late or not len(self.order):
            return iter(self._ready)
        return self.order.line_up(
            self._ready.by_place, self._suspects.may_be_admitted(self._admitted)
        )

    def next_grammar(self) -> DueGrammar | None:
        """Returns the grammar that the ranks must compile next. Returns None if no grammar is
        needed, or while the ranks compile a grammar."""
        if not self.grammars.is_needed:
            return None
        return self.grammars.next_due(self.line())

    def line(self) -> Iterator[Request]:
        """Yields the waiting requests in order. Leaves out requests that suspects hold back."""
        return self.order.line_up((), self._suspects.may_be_admitted(self._admitted))

    def batch_limits(self, vector_tokens: int | None = None) -> BatchLimits | None:
        """Returns the limits on tokens in the next batch: of each client, and of all requests for
        vectors (`vector_tokens`). Returns None if there are none. No client is limited while a
        suspect waits for its trial or is on trial."""
        ready, of_order = self._ready.by_place, None
        if not self.has_trials:
            of_order = self.order.batch_limits(self._admitted, ready, pipeline=self.number)
        only_vectors_wait = vector_tokens is not None and not self.n_waiting_answers
        return self._vectors.limits(vector_tokens, of_order, only_vectors_wait=only_vectors_wait)

    def mark_running(
        self, requests: Sequence[Request], *, can_run: Callable[[Request], bool]
    ) -> None:
        """Moves all requests of a batch from INITIATION or INCREMENT to RUNNING. Requests for which
        `can_run` is true stay candidates for the next iteration."""
        n_before = len(self._admitted)
        for request in requests:
            if request.state is _INITIATION:
                self.order.admit(request)
                request.moved_from = (
                    None if request.pipeline in (-1, self.number) else request.pipeline
                )
                request.pipeline = self.number
                has_changed = request.generated_token_ids and request.build not in ("", self.build)
                request.left_build = request.build if has_changed else None
                request.build = self.build
                self.waiting.remove(request)
                self._suspects.admit(request)
                self.gates.admit(request)
                self._admitted[request] = None
                self.n_running_vectors += request.wants_vector
                self._ready.add(request)
            request.state = _RUNNING
        self.prefills.settle(requests)
        self._ready.replace(
            [one for one in self._ready.by_place if one.state is not _RUNNING or can_run(one)]
        )
        if len(self._admitted) > n_before:
            self.shared.offer_rest(self)

    def mark_returned(self, request: Request) -> None:
        """Moves a request from RUNNING to INCREMENT."""
        request.state = _INCREMENT
        self._ready.add(request)

    def remove(self, request: Request) -> None:
        """Moves a request from any state to FINISHED, and out of the pool."""
        self.order.remove(request)
        self.gates.remove(request)
        if request.state is _INITIATION:
            self._suspects.remove(request)
            self.waiting.remove(request)
        else:
            self._leave(request)
        request.state = RequestState.FINISHED
        self.shared.count(request, -1)
        if not self.shared.n_tokens:
            self.shared.wake_all()  # pipelines that are to end once the pool is empty

    def hold_back(self, request: Request) -> None:
        """Keeps an admitted request from being selected, until `let_run` or `mark_returned` is
        called."""
        self._ready.discard(request)

    def let_run(self, request: Request) -> None:
        """Lets a request that was held back be selected again."""
        self._ready.add(request)

    def move(self, request: Request, place: int) -> None:
        """Gives an admitted request another place in the order. The place must be free."""
        is_ready = self._ready.discard(request)
        request.place = place
        if is_ready:
            self._ready.add(request)

    def preempt(self, request: Request) -> None:
        """Makes an admitted request wait again at its place in the order. The request must be in no
        batch."""
        self.release([request])

    def release(self, requests: Sequence[Request]) -> None:
        """Makes admitted requests wait again at their places in the order. No batch in flight of
        this pipeline may contain these requests."""
        for request in requests:
            self._leave(request)
            self.gates.preempt(request)
        self._restore(requests)
        self.shared.wake_others(self)

    def preempt_all(self) -> list[Request]:
        """Makes all admitted requests wait again, because the epoch is over. Returns them."""
        begun = list(self._admitted)
        self.is_late = False
        self._admitted.clear()
        self.n_running_vectors = 0
        self.prefills = Prefills()
        self._ready.replace([])
        self._restore(begun)
        self._suspects.reset(self.order)
        self.gates.reset(self.order)
        self.shared.wake_others(self)
        return begun

    def _leave(self, request: Request) -> None:
        """Removes a request from the admitted ones."""
        del self._admitted[request]
        self.n_running_vectors -= request.wants_vector
        self.prefills.discard(request)
        self.hold_back(request)

    def _restore(self, begun: Sequence[Request]) -> None:
        for request in begun:
            request.begin_anew()
        self.order.restore(begun)
        for request in begun:
            self.waiting.add(request, has_begun=True)
            self._suspects.add(request)
