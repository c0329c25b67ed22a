"""Tokens that are banned next in an output, because the request bans words.

A word is a sequence of tokens. If the output ends with all tokens of a word except the last one,
the word's last token is banned. Only generated tokens are compared, as in vLLM.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from services.common.sampling import SamplingParams
from services.worker.engine.token_rules import allowed_mask


class BadWordsMatcher:
    """Tells which tokens may come next in an output whose request bans words. Implements the
    protocol `Matcher`, and includes the request's lists of allowed and of banned tokens."""

    is_cut = False

    def __init__(self, sampling: SamplingParams, *, vocab_size: int) -> None:
        self._allowed = allowed_mask(sampling, vocab_size)
        self._last_tokens: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for word in sampling.bad_words:
            self._last_tokens[word[:-1]].add(word[-1])
        lengths = sorted({len(beginning) for beginning in self._last_tokens})
        self._lengths: Sequence[int] = lengths
        self._generated: deque[int] = deque(maxlen=max(lengths, default=0))

    def take(self, token_id: int) -> None:
        """Adds a token to the output."""
        self._generated.append(token_id)

    def mask(self) -> bytes:
        """Returns the tokens that may come next, as a bit mask: bit b of 32-bit word w is set if
        token 32 w + b is allowed."""
        tokens = tuple(self._generated)
        is_allowed = self._allowed.copy()
        for length in self._lengths:
            if length <= len(tokens):
                beginning = tokens[len(tokens) - length :]
                is_allowed[list(self._last_tokens.get(beginning, ()))] = False
        return np.packbits(is_allowed, bitorder="little").tobytes()
