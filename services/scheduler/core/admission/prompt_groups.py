"""Groups of prompts: prompts that arrive together need not all begin in one batch, even if they
fit.

If all began in one batch, all their first tokens would come when that batch returns. Suppose
instead that prompts of n tokens together begin in groups of g tokens. The prompts of a group wait
for each other and for all groups before. Each group also has a constant cost: the time of c tokens,
whatever the group contains. On average a prompt then waits for the time of (n + g + n·c / g) / 2
tokens. This is least for groups of sqrt(n·c) tokens: a few prompts run nearly one by one, and many
fill the batch. Users whose answers came together then get the next answers at different times, so
that their next requests arrive at different times too.

Only the square root of c matters, so a power of two is exact enough for c. The constant c is about
12 on a processor, about 300 on a large GPU, and larger beside many decoding requests (`overhead.py`
learns c).
"""

from math import ceil, sqrt

FIRST_OVERHEAD_TOKENS = 64
"""Assumed overhead until it is known: a value between the overheads of a processor and of a large
GPU."""


class PromptGroups:
    """Decides when a batch has begun enough prompts, and forecasts the number of iterations until
    all waiting prompts have begun."""

    def __init__(self, *, max_batch_size: int, max_batch_tokens: int, n_shares: int = 1) -> None:
        """Batches have at most `max_batch_size` requests and `max_batch_tokens` tokens. The
        decoding requests are divided evenly among `n_shares` batches in flight."""
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.n_shares = n_shares
        self.overhead_tokens = FIRST_OVERHEAD_TOKENS
        """The constant c of this module's description: the number of prompt tokens that take as
        long as the rest of an iteration. The rest is mostly the reading of weights."""

    def learn_overhead(self, n_tokens: int) -> bool:
        """Sets the overhead of an iteration to `n_tokens` prompt tokens. Returns whether the value
        is new."""
        is_news = self.overhead_tokens != n_tokens
        self.overhead_tokens = n_tokens
        return is_news

    def is_whole(self, n_prompts: int, n_tokens: int, *, n_waiting: int) -> bool:
        """Returns whether `n_prompts` prompts with `n_tokens` tokens together are a whole group, so
        that no further prompt begins in their batch. `n_waiting` more prompts wait, and are assumed
        to be equally long on average."""
        return n_tokens * n_prompts >= self.overhead_tokens * (n_prompts + n_waiting) > 0

    def n_iterations(self, n_prompts: float, n_tokens: float, *, n_running: int) -> float:
        """Returns the number of iterations until `n_prompts` waiting prompts have begun. The
        prompts have `n_tokens` tokens together, and `n_running` requests are decoding beside them.
        The number of waiting prompts is assumed to stay constant, because others arrive
        meanwhile."""
        n_prompts = max(1.0, n_prompts)
        n_decodes = min(-(-n_running // self.n_shares), self.max_batch_tokens - 1)
        n_seen = min(n_prompts, max(1, self.max_batch_size - n_decodes))
        n_tokens_each = max(1.0, n_tokens / n_prompts)
        group_size = ceil(sqrt(self.overhead_tokens * n_seen / n_tokens_each))
        n_group_tokens = min(n_seen, group_size) * n_tokens_each
        return n_tokens / min(n_group_tokens, self.max_batch_tokens - n_decodes)


class NoPromptGroups:
    """Replacement for `PromptGroups` that does not group prompts: every prompt begins as soon as
    there is room for it."""

    def learn_overhead(self, n_tokens: int) -> bool:
        """Returns False: the overhead of an iteration changes nothing here."""
        return False

    def n_iterations(self, n_prompts: float, n_tokens: float, *, n_running: int) -> float:
        """Returns 0: prompts do not wait for groups."""
        return 0.0


NO_PROMPT_GROUPS = NoPromptGroups()
