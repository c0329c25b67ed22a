"""The K/V groups of a model: each group is a set of layers that keep keys and values of the same
tokens.

A layer with a window reads only the last tokens of a sequence. So each block stores `block_size`
tokens for the layers of one group, and blocks have equal sizes in all groups. A request has blocks
of its own in every group. In a group whose layers see all tokens, these blocks start at the first
token; in a group with a window, they cover only the last tokens. The n-th blocks of a request, one
in each group, form its n-th column.

A model has a single group if no layer has a window, or if all layers have the same window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """The K/V groups of a model, and the largest sizes of the spans that read these groups."""

    windows: Sequence[int | None] = (None,)
    """Number of tokens that a query sees in each group, including the token of the query; None
    where the query sees all tokens. Groups that see all tokens come first."""
    max_span_tokens: int | None = None
    """Largest number of prompt tokens in one span; None where a prompt is always one span."""
    max_drafts: int = 0
    """Largest number of drafted tokens after the token of a decode."""
    n_whole: int = field(init=False)
    """Number of groups that see all tokens."""
    finite: tuple[int, ...] = field(init=False)
    """The windows of the groups that do not see all tokens, in the order of the groups."""

    def __post_init__(self) -> None:
        finite = tuple(window for window in self.windows if window is not None)
        n_whole = len(self.windows) - len(finite)
        is_sorted = all(window is None for window in self.windows[:n_whole])
        if not self.windows or not is_sorted or min(finite, default=1) < 1:
            raise ValueError(f"no K/V groups: windows {self.windows}")
        object.__setattr__(self, "finite", finite)
        object.__setattr__(self, "n_whole", n_whole)

    def n_at_once(self, n_unscheduled: int) -> int:
        """Returns the largest number of tokens that a later span of a request may have, if
        `n_unscheduled` tokens of the request are not scheduled yet."""
        if self.max_span_tokens is not None:
            n_unscheduled = min(n_unscheduled, self.max_span_tokens)
        return max(n_unscheduled, 1 + self.max_drafts)

    def n_blocks(self, n_columns: int, n_at_once: int, *, block_size: int) -> int:
        """Returns the largest number of blocks that a request may have while its sequence takes
        `n_columns` columns of blocks. Its spans have at most `n_at_once` tokens."""
        n_blocks = self.n_whole * n_columns
        for window in self.finite:
            # A span reads and writes `window - 1 + n_at_once` positions in a row.
            n_touched = -(-(window + n_at_once - 2) // block_size) + 1
            n_blocks += min(n_columns, n_touched)
        return n_blocks

    def by_group(self, block_ids: list[int]) -> list[int]:
        """Returns blocks of the groups that see all tokens, ordered group by group. `block_ids` are
        ordered column by column."""
        n = self.n_whole
        if n == 1:
            return block_ids.copy()
        return [block_id for place in range(n) for block_id in block_ids[place::n]]


ONE_GROUP = BlockGroups()
"""The K/V groups of a model without windows: a single group."""


def first_seen(position: int, window: int) -> int:
    """Returns the first position of a sequence that queries at `position` or later see through a
    window."""
    return max(0, position - window + 1)
