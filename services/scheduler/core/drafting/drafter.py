"""Drafts: guesses at a request's next tokens, which one iteration verifies together.

Texts repeat themselves: a summary names what its prompt has named, edited code is mostly the old
code. So the last tokens of a sequence are looked for further up in it, and what followed there is
the draft (Saxena, "Prompt lookup decoding", 2023). No second model is needed. The draft rides at
the end of the request's span, the rank samples after each of its tokens, and the scheduler takes
the sampled tokens as far as the draft was right, and the token after that. These are, to the bit,
the tokens that would have come one by one, since each depends only on the tokens before it.

A batch that reads all weights for a few tokens has room for drafts at little cost; in a full batch
a draft costs as much as a token of another request. So the more requests there are, the more often
a draft must be right: of `n` requests in a batch of at most `max_batch_tokens` tokens, more than `n
/ max_batch_tokens` of the drafted tokens, by the recent drafts of the request. Where fewer are
right, the request stops drafting for some tokens, longer each time.

Knows tokens and counts, neither requests nor batches.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.scheduler.core.speculation import FIRST_ACCEPTANCE, Speculation

NGRAMS = (4, 3, 2)
"""Tokens at the end of a sequence that are looked for further up: if not so many, fewer."""

SEARCHED_TOKENS = 2**14
"""Tokens of a sequence, the last ones, that are looked through at most: a millisecond."""

MAX_SEARCHES = 8
"""Places that are looked at for whole tokens: bytes may match between two of them."""

_TOKEN_BYTES = 4


def n_leading_equal(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Returns how many tokens of a draft were sampled before the first that was not."""
    for place, (token_id, right) in enumerate(zip(draft, sampled, strict=False)):
        if token_id != right:
            return place
    return min(len(draft), len(sampled))


def look_up(packed: bytes, length: int) -> list[int]:
    """Returns the `length` tokens that followed where the last tokens of a sequence occurred
    before, or none. The sequence is `packed` in 4 bytes each.

    As many tokens as can be must be the same, see `NGRAMS`; of several places it is the last. If
    the end of the sequence comes first, the sequence repeats itself, and goes on so in the draft.
    """
    place = _last_place(packed, NGRAMS[-1])
    if place < 0:
        return []
    for n_tokens in NGRAMS[:-1]:
        better = _last_place(packed, n_tokens)
        if better >= 0:
            return _repeated(packed[better:], length)
    return _repeated(packed[place:], length)


def _last_place(packed: bytes, n_tokens: int) -> int:
    """Returns the byte after the last place where the last tokens occurred before; -1 if they did
    not."""
    suffix = packed[-n_tokens * _TOKEN_BYTES :]
    end = len(packed) - _TOKEN_BYTES
    for _ in range(MAX_SEARCHES):
        place = packed.rfind(suffix, 0, end)
        if place < 0 or place % _TOKEN_BYTES == 0:
            return place if place < 0 else place + len(suffix)
        end = place + len(suffix) - 1
    return -1


def _repeated(packed: bytes, length: int) -> list[int]:
    followers = array("I", packed[: length * _TOKEN_BYTES])
    n_times = -(-length // len(followers))
    return (followers * n_times)[:length].tolist()


Propose = Callable[[bytes, int], list[int]]
"""A function that drafts at most so many tokens of a sequence, which is packed in 4 bytes each."""


@dataclass(slots=True)
class Drafter:
    """Decides which requests get drafts, and how long these are."""

    max_drafts: int
    """Drafts of one request at most."""
    max_batch_tokens: int
    """Tokens of a batch with drafts at most."""
    propose: Propose = look_up
    """Finds the draft of a sequence."""
    n_drafted: int = 0
    """Drafted tokens that were verified."""
    n_accepted: int = 0
    """Drafted tokens that were right."""

    def pays(self, speculation: Speculation, n_tokens: int, n_batch_tokens: int) -> bool:
        """Returns whether to draft for a request with `n_tokens` tokens in a batch of so many
        tokens; stops it for a while if its drafts are wrong too often."""
        if n_tokens < speculation.resumes_at:
            return False
        if speculation.acceptance * self.max_batch_tokens > n_batch_tokens:
            return True
        if FIRST_ACCEPTANCE * self.max_batch_tokens > n_batch_tokens:
            speculation.stop(n_tokens)
        return False

    def learn(self, speculation: Speculation, n_drafted: int, n_right: int) -> None:
        """Takes in how many tokens of a request's draft were right."""
        self.n_drafted += n_drafted
        self.n_accepted += n_right
        speculation.learn(n_drafted, n_right)
        speculation.length = min(speculation.length, self.max_drafts)
