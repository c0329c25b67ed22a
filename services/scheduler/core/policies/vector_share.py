"""The share of a batch that the prompts of requests for vectors (embeddings, scores) may have
beside requests that generate tokens. `admission/vector_gate.py` keeps this limit, and has the
reason for it."""

from collections.abc import Iterable

from services.scheduler.core.admission.prompt_groups import PromptGroups
from services.scheduler.core.policies import PoolView
from services.scheduler.core.request import Request

MAX_SHARE = 1000.0
"""Largest share: the time that prompts of requests for vectors may add to an iteration, divided by
its time without prompts. With this share, these requests are not limited."""


def share_tokens(overhead_tokens: int, share: float) -> int:
    """Returns how many tokens the prompts of requests for vectors may have in a batch beside
    requests that generate tokens: at least 1. `overhead_tokens` is the number of prompt tokens that
    take as long as an iteration without prompts, and `share` the fraction of that time."""
    return max(1, int(overhead_tokens * share))


class WholeBatches:
    """No limit: prompts of requests for vectors may fill a batch."""

    def limit(self, pool: PoolView) -> tuple[int | None, int]:
        """Returns the limit on the tokens of all requests for vectors in the next batch, or None if
        there is none. Also returns the number of waiting requests that begin in groups
        (`prompt_groups.py`)."""
        return None, pool.n_waiting

    def n_tokens(self, ready: Iterable[Request]) -> int:
        """Returns how many tokens the requests `ready` can have in the next batch."""
        return sum([one.n_unscheduled for one in ready])


class VectorShare(WholeBatches):
    """A limit that holds while requests that generate tokens run or wait."""

    def __init__(self, share: float, prompt_groups: PromptGroups) -> None:
        """`share` is the fraction of the time of an iteration without prompts, which
        `prompt_groups` knows.

        Raises:
            ValueError: `share` is not in its range.
        """
        if not 0.0 < share <= MAX_SHARE:
            raise ValueError(f"vector_share: {share} is not above 0 and at most {MAX_SHARE}")
        self._share = share
        self._prompt_groups = prompt_groups

    def limit(self, pool: PoolView) -> tuple[int | None, int]:
        """Returns the limit as the base class does. Under a limit, requests for vectors do not
        begin in groups."""
        if not pool.has_both_kinds:
            return None, pool.n_waiting
        return self._n_tokens_at_most, pool.n_waiting_answers

    def n_tokens(self, ready: Iterable[Request]) -> int:
        n_answers = n_vectors = 0
        for one in ready:
            if one.wants_vector:
                n_vectors += one.n_unscheduled
            else:
                n_answers += one.n_unscheduled
        return n_answers + (min(n_vectors, self._n_tokens_at_most) if n_answers else n_vectors)

    @property
    def _n_tokens_at_most(self) -> int:
        return share_tokens(self._prompt_groups.overhead_tokens, self._share)


def vector_share_of(share: float | None, prompt_groups: PromptGroups) -> WholeBatches:
    """Returns the limit for the setting `vector_share`. There is no limit if `share` is None or
    `MAX_SHARE`.

    Raises:
        ValueError: `share` is not in its range.
    """
    if share is None or share == MAX_SHARE:
        return WholeBatches()
    return VectorShare(share, prompt_groups)
