"""Groups of prompts: prompts that come together need not all begin in one batch, even if they fit.

If they did, all their first tokens would come when that batch returns. In groups of g out of n
tokens, the prompts of a group wait for each other, and all for the groups before them, each of
which also takes as long as some c tokens whatever is in it. A prompt then waits for the time of (n
+ g + n·c / g) / 2 tokens in the mean, least for groups of sqrt(n·c): few prompts run nearly one by
one, and many fill the batch. Users whose answers came together then get them at different times,
and what they send next arrives at different times.

Of c only the root counts, so a power of two is near enough. It is some 12 on a processor, some 300
on a large GPU, and more beside many decoding requests (`overhead.py` learns it).
"""

from math import ceil, sqrt

FIRST_OVERHEAD_TOKENS = 64
"""The overhead until it is known: between the overhead of a processor and of a large GPU."""


class PromptGroups:
    """Decides how many prompts begin in a batch, and so how many batches a line of prompts
    takes."""

    def __init__(self, *, max_batch_size: int, max_batch_tokens: int, n_shares: int = 1) -> None:
        """Batches are limited in requests and in tokens; `n_shares` batches in flight share the
        decoding requests evenly."""
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.n_shares = n_shares
        self.overhead_tokens = FIRST_OVERHEAD_TOKENS
        """Prompt tokens that take about as long as everything else in an iteration, most of which
        is reading weights: c above."""

    def learn_overhead(self, n_tokens: int) -> bool:
        """Takes in that an iteration costs as much as so many tokens of prompts besides its own;
        returns whether that is news."""
        is_news = self.overhead_tokens != n_tokens
        self.overhead_tokens = n_tokens
        return is_news

    def is_whole(self, n_prompts: int, n_tokens: int, *, n_waiting: int) -> bool:
        """Returns whether `n_prompts` prompts with `n_tokens` tokens together are a whole group, if
        `n_waiting` more wait, which are taken to be as long."""
        return n_tokens * n_prompts >= self.overhead_tokens * (n_prompts + n_waiting) > 0

    def n_iterations(self, n_prompts: float, n_tokens: float, *, n_running: int) -> float:
        """Returns the iterations in which a line of `n_prompts` prompts with `n_tokens` tokens
        together begins, beside `n_running` decoding requests. The line is taken to stay as long as
        it is, since others arrive meanwhile."""
        n_prompts = max(1.0, n_prompts)
        n_decodes = min(-(-n_running // self.n_shares), self.max_batch_tokens - 1)
        n_seen = min(n_prompts, max(1, self.max_batch_size - n_decodes))
        n_tokens_each = max(1.0, n_tokens / n_prompts)
        group_size = ceil(sqrt(self.overhead_tokens * n_seen / n_tokens_each))
        n_group_tokens = min(n_seen, group_size) * n_tokens_each
        return n_tokens / min(n_group_tokens, self.max_batch_tokens - n_decodes)


class NoPromptGroups:
    """Lets all prompts begin for which there is room."""

    def learn_overhead(self, n_tokens: int) -> bool:
        """Returns that the overhead of an iteration is no news: it changes nothing."""
        return False

    def n_iterations(self, n_prompts: float, n_tokens: float, *, n_running: int) -> float:
        """Returns 0: prompts wait for no group before them."""
        return 0.0


NO_PROMPT_GROUPS = NoPromptGroups()
