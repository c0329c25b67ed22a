"""Words that must not be generated, with vLLM's meaning: the last token of a word is banned where
it would complete the word, and tokens of the prompt do not count."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.common.sampling import SamplingParams
from services.worker.engine.bad_words import BadWordsMatcher
from services.worker.engine.constraints import Constraints

VOCAB_SIZE = 70
WORDS = ((3,), (5, 6), (5, 7), (1, 5, 8), (6, 6, 6), (9, 5, 6))


def allowed(matcher: BadWordsMatcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def banned(generated: list[int]) -> set[int]:
    """What may not come next, word by word."""
    return {
        word[-1]
        for word in WORDS
        if generated[len(generated) - len(word) + 1 :] == list(word[:-1])
        and len(generated) >= len(word) - 1
    }


def test_the_last_token_of_a_word_is_banned_where_it_completes_the_word() -> None:
    matcher = BadWordsMatcher(SamplingParams(bad_words=WORDS), vocab_size=VOCAB_SIZE)
    rng, generated = random.Random(3), list[int]()
    seen = set()
    for _ in range(400):
        expected = set(range(VOCAB_SIZE)) - banned(generated)
        assert allowed(matcher) == expected
        seen |= banned(generated)
        token = rng.choice((1, 5, 6, 7, 8, 9))
        matcher.take(token)
        generated.append(token)
    assert seen == {3, 6, 7, 8}


def test_lists_of_tokens_count_too() -> None:
    sampling = SamplingParams(
        allowed_token_ids=(3, 5, 6, 9), bad_token_ids=(9,), bad_words=((5, 6), (6,) * 3)
    )
    matcher = BadWordsMatcher(sampling, vocab_size=VOCAB_SIZE)
    assert allowed(matcher) == {3, 5, 6}
    matcher.take(5)
    assert allowed(matcher) == {3, 5}


@pytest.mark.parametrize("n_before", [0, 1, 2, 3])
def test_a_request_that_is_resumed_knows_its_tokens(n_before: int) -> None:
    """Tokens of the prompt (1, 5) do not count; generated ones that were sent again do, once."""
    matcher = BadWordsMatcher(SamplingParams(bad_words=WORDS), vocab_size=VOCAB_SIZE)
    constraints = Constraints(None)
    constraints.hold(0, matcher, n_prompt_tokens=2)
    sequence = [1, 5, 9, 1, 5]
    constraints.take_sent(0, 0, sequence[: 2 + n_before])
    assert allowed(matcher) == set(range(VOCAB_SIZE)) - banned(sequence[2 : 2 + n_before])
    constraints.take_sent(0, 1, sequence[1:])  # some of them again
    assert allowed(matcher) == set(range(VOCAB_SIZE)) - {3, 6, 7, 8}
