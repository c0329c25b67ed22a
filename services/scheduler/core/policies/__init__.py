"""The contract of policies: a policy chooses the requests of the next iteration, and the number of
tokens of each request.

A policy is a subclass of `Policy` in a file of its own. A policy of this project has a line in
`registry.py`; a policy of an installed package has an entry point in the group `orcinus.policies`.
`docs/writing-a-policy.md` is the guide.

A policy sees requests, the pool (`PoolView`) and the K/V memory (`MemoryView`), and changes none of
them, except that it reserves memory for the requests that it admits. From then on, the tokens of an
admitted request that are in the prefix cache count as scheduled. `checked.py` has the rules that
each selection must keep.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, Self

from services.common.named_tuples import maker
from services.scheduler.core.admission.prompt_groups import (
    NO_PROMPT_GROUPS,
    NoPromptGroups,
    PromptGroups,
)
from services.scheduler.core.memory.reservation import Reservation
from services.scheduler.core.order.order import BatchLimits
from services.scheduler.core.request import Request

POLICY_API = 1
"""Version of the contract of policies. The number grows when policies written for the version
before may no longer work."""


class Selection(NamedTuple):
    """A chosen request, the number of its tokens to run, and its reservation."""

    request: Request
    n_tokens: int
    reservation: Reservation


selection_of = maker(Selection)
"""Makes a selection from a tuple of its fields."""


class PoolView(Protocol):
    """The interface through which a policy reads the requests of a pipeline."""

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait to run for the first time, or again."""
        ...

    @property
    def n_running(self) -> int:
        """Number of requests that the pipeline has admitted and that have not ended."""
        ...

    @property
    def n_waiting_answers(self) -> int:
        """Number of the waiting requests that generate tokens: all but the requests for vectors."""
        ...

    @property
    def has_both_kinds(self) -> bool:
        """Whether both requests for vectors and requests for tokens run in this pipeline or wait,
        so that the requests for vectors should be limited."""
        ...

    def candidates(self) -> Iterator[Request]:
        """Yields the requests that can be in the next batch: the running ones first, in the order
        of their places, and then the waiting ones in the order in which they are to be
        admitted."""
        ...

    def batch_limits(self, vector_tokens: int | None = None) -> BatchLimits | None:
        """Returns the limits on tokens in the next batch: of each client, and of all requests for
        vectors together. Returns None if there are no limits. `vector_tokens` is the limit of the
        requests for vectors, or None if they are not limited. Must be called before
        `candidates`."""
        ...


class MemoryView(Protocol):
    """The interface through which a policy reserves blocks of a pipeline's K/V memory for
    requests."""

    @property
    def n_free_blocks(self) -> int:
        """Number of blocks that no request has reserved."""
        ...

    def n_blocks_to_admit(self, request: Request) -> int:
        """Returns how many blocks `reserve` would reserve for a waiting request if the prefix cache
        had none of its tokens."""
        ...

    def reserve(self, request: Request) -> Reservation | None:
        """Reserves memory for a waiting request, and returns the reservation. The policy must then
        put the request into the batch that it selects. Returns None if the request cannot be
        admitted now, mostly because there is not enough memory."""
        ...


class LengthPredictor(Protocol):
    """Predicts how many tokens requests will generate."""

    def learn(self, n_generated: int, max_new_tokens: int) -> None:
        """Learns that an ended request has generated `n_generated` tokens of `max_new_tokens`."""
        ...

    def n_left(self, request: Request) -> float:
        """Returns the number of tokens that a request is expected to generate from now on."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The settings that policies may use."""

    max_batch_size: int
    """Largest number of requests in a batch."""
    max_batch_tokens: int | None = None
    """Largest number of tokens in a batch; None where there is no limit."""
    n_shares: int = 1
    """Number of batches in flight among which the running requests are divided evenly. With 1, each
    batch may have all running requests."""
    predictor: LengthPredictor | None = field(default=None, compare=False)
    """Predictor of the lengths of outputs. With None, a policy that needs one learns lengths from
    the requests that have ended."""
    vector_share: float | None = None
    """Limit on the time that prompts of requests for vectors (embeddings, scores) add to an
    iteration, as a fraction of the time of an iteration without prompts. It holds while requests
    that generate tokens run or wait. None where there is no limit."""


class Policy(ABC):
    """Chooses the requests of each batch. A subclass must have a `name`, an `api` and `select`."""

    api: ClassVar[int]
    """`POLICY_API` of the contract for which a policy of a package is written."""
    name: ClassVar[str]
    """The value of the setting `policy`."""
    takes_drafts: ClassVar[bool] = False
    """Whether the decodes of the policy's batches may carry drafts."""
    keeps_order: ClassVar[bool] = True
    """Whether the policy admits waiting requests only in the order of the pool, so that none
    overtakes an earlier one. `checked.py` checks this."""
    limits_vectors: ClassVar[bool] = False
    """Whether the policy limits prompts of requests for vectors, by `vector_share`, while requests
    that generate tokens run or wait."""
    max_span_tokens: int | None = None
    """Largest number of tokens of one request in a batch. None if there is no limit, so that a
    whole prompt is one span."""
    max_tokens: int | None = None
    """Largest number of tokens of a batch. None where the policy has no limit."""
    prompt_groups: PromptGroups | NoPromptGroups = NO_PROMPT_GROUPS
    """Decides how many prompts begin together in a batch."""

    def __init__(self, options: PolicyOptions) -> None:
        if options.max_batch_size < 1 or options.n_shares < 1:
            raise ValueError(
                "max_batch_size and n_shares must be at least 1, not "
                f"{options.max_batch_size}, {options.n_shares}"
            )
        self.max_batch_size = options.max_batch_size
        """Largest number of requests in a batch."""
        self._options = options

    @classmethod
    def of(cls, options: PolicyOptions) -> Self:
        """Returns the policy with the given options.

        Raises:
            ValueError: the policy cannot have these options.
        """
        return cls(options)

    @property
    def options(self) -> PolicyOptions:
        """The options with which the policy was made. Options that the policy does not use may have
        defaults."""
        return self._options

    @abstractmethod
    def select(self, pool: PoolView, kv_manager: MemoryView) -> list[Selection]:
        """Returns the requests of the next batch in order. Returns an empty list if no request can
        run."""

    def is_full(self, ready: Sequence[Request]) -> bool:
        """Returns whether the next batch has no room for another request once it contains all of
        the running requests `ready`."""
        return len(ready) >= self.max_batch_size

    def answered_with(self, request: Request) -> Collection[Request]:
        """Returns the requests that must all be complete before the answer of `request` is
        returned, with `request` among them. If the collection is empty, each token is returned at
        once. Only the scheduler in `whole_batches.py` withholds answers."""
        return ()
