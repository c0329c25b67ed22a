"""Drafts: guesses of a request's next tokens, which one iteration verifies together.

Texts repeat themselves: a summary repeats names of its prompt, and edited code is mostly the old
code. So the last tokens of a sequence are searched for earlier in the sequence, and the tokens that
followed there are the draft (Saxena, "Prompt lookup decoding", 2023). No second model is needed.
The draft is appended to the request's span, and the rank samples a token after each token of the
span. The scheduler accepts the sampled tokens as long as the draft was right, and one token more.
The accepted tokens are, to the bit, the tokens that decoding one by one would give, because each
token depends only on the tokens before it.

A batch with few tokens reads all weights anyway, so drafts add little cost; in a full batch a draft
costs as much as a token of another request. So the more requests there are, the more often a draft
must be right. With `n` requests in a batch of at most `max_batch_tokens` tokens, more than `n /
max_batch_tokens` of the drafted tokens must be right, measured by the recent drafts of the request.
Where fewer are right, the request stops drafting for a number of tokens, which grows each time.

This module knows tokens and counts, but neither requests nor batches.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.scheduler.core.speculation import FIRST_ACCEPTANCE, Speculation

NGRAMS = (4, 3, 2)
"""Numbers of tokens at the end of a sequence that are searched for earlier in the sequence. The
largest number with a match wins."""

SEARCHED_TOKENS = 2**14
"""Largest number of tokens, at the end of a sequence, that are searched. The search takes a
millisecond."""

MAX_SEARCHES = 8
"""Largest number of byte matches that a search tries. A match of bytes may begin in the middle of a
token; such a match does not count."""

_TOKEN_BYTES = 4


def n_leading_equal(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Returns how many tokens of a draft equal the sampled tokens before the first difference."""
    for place, (token_id, right) in enumerate(zip(draft, sampled, strict=False)):
        if token_id != right:
            return place
    return min(len(draft), len(sampled))


def look_up(packed: bytes, length: int) -> list[int]:
    """Returns `length` tokens that followed an earlier occurrence of the last tokens of a sequence.
    Returns an empty list if there is no such occurrence. The sequence is `packed` in 4 bytes per
    token.

    The longest match counts (see `NGRAMS`), and of several equally long matches the last one. If
    fewer than `length` tokens follow the match, the sequence is repeating itself. The draft then
    repeats these tokens.
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
    """Returns the index of the byte after the last earlier occurrence of the last `n_tokens`
    tokens. Returns -1 if there is none."""
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
"""Function that drafts tokens. Its parameters are a sequence, packed in 4 bytes per token, and the
largest number of tokens to draft."""


@dataclass(slots=True)
class Drafter:
    """Decides which requests get drafts, and how long the drafts are."""

    max_drafts: int
    """Largest number of drafted tokens for one request in one batch."""
    max_batch_tokens: int
    """Largest number of tokens in a batch that has drafts."""
    propose: Propose = look_up
    """Function that finds the draft of a sequence."""
    n_drafted: int = 0
    """Number of drafted tokens that the model has verified."""
    n_accepted: int = 0
    """Number of drafted tokens that were right."""

    def pays(self, speculation: Speculation, n_tokens: int, n_batch_tokens: int) -> bool:
        """Returns whether drafting pays for a request with `n_tokens` tokens, in a batch of
        `n_batch_tokens` tokens. If the request's drafts are wrong too often, drafting for the
        request stops for a while."""
        if n_tokens < speculation.resumes_at:
            return False
        if speculation.acceptance * self.max_batch_tokens > n_batch_tokens:
            return True
        if FIRST_ACCEPTANCE * self.max_batch_tokens > n_batch_tokens:
            speculation.stop(n_tokens)
        return False

    def learn(self, speculation: Speculation, n_drafted: int, n_right: int) -> None:
        """Learns that `n_right` of the `n_drafted` tokens in a request's draft were right."""
        self.n_drafted += n_drafted
        self.n_accepted += n_right
        speculation.learn(n_drafted, n_right)
        speculation.length = min(speculation.length, self.max_drafts)
