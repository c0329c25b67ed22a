"""The K/V groups of a model: layers that keep the keys and values of the same tokens.

A layer with a window reads the last tokens of a sequence only. So a block holds what the layers of
one group store of `block_size` tokens, as many bytes in each group, and a request has blocks of its
own in every group: in one whose layers see everything from its first token on, in one with a window
of the last tokens. The n-th blocks of a request, one in each group, are its n-th column.

A model without windows has one group, and so has one whose layers all have the same window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """The K/V groups of a model, and the largest spans of tokens that read them."""

    windows: Sequence[int | None] = (None,)
    """Tokens that a query sees in each group, its own token included; None where it sees all
    tokens. Groups that see all tokens come first."""
    max_span_tokens: int | None = None
    """Tokens in a span of a prompt at most; None where a prompt is one span."""
    max_drafts: int = 0
    """Largest number of drafts behind the token of a decode."""
    n_whole: int = field(init=False)
    """Number of groups that see all tokens."""
    finite: tuple[int, ...] = field(init=False)
    """The windows of the other groups, in order."""

    def __post_init__(self) -> None:
        finite = tuple(window for window in self.windows if window is not None)
        n_whole = len(self.windows) - len(finite)
        is_sorted = all(window is None for window in self.windows[:n_whole])
        if not self.windows or not is_sorted or min(finite, default=1) < 1:
            raise ValueError(f"no K/V groups: windows {self.windows}")
        object.__setattr__(self, "finite", finite)
        object.__setattr__(self, "n_whole", n_whole)

    def n_at_once(self, n_unscheduled: int) -> int:
        """Returns the tokens in a span at most from now on, of a request that begins with
        `n_unscheduled` tokens which have not been scheduled."""
        if self.max_span_tokens is not None:
            n_unscheduled = min(n_unscheduled, self.max_span_tokens)
        return max(n_unscheduled, 1 + self.max_drafts)

    def n_blocks(self, n_columns: int, n_at_once: int, *, block_size: int) -> int:
        """Returns the blocks that a request with so many columns has at most, in spans of up to
        `n_at_once` tokens."""
        n_blocks = self.n_whole * n_columns
        for window in self.finite:
            # A span reads and writes `window - 1 + n_at_once` positions in a row.
            n_touched = -(-(window + n_at_once - 2) // block_size) + 1
            n_blocks += min(n_columns, n_touched)
        return n_blocks

    def by_group(self, block_ids: list[int]) -> list[int]:
        """Returns blocks of the groups that see everything, given column by column, in the order of
        their groups."""
        n = self.n_whole
        if n == 1:
            return block_ids.copy()
        return [block_id for place in range(n) for block_id in block_ids[place::n]]


ONE_GROUP = BlockGroups()
"""The groups of a model without windows."""


def first_seen(position: int, window: int) -> int:
    """Returns the first position that queries from `position` on see through a window."""
    return max(0, position - window + 1)
