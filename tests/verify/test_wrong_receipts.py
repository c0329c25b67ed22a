"""Verification by computing again finds receipts that a dishonest owner of the key has changed and
signed again. The model is replaced by `Counting`."""

import asyncio
import string
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.verify.given import Unreadable
from services.verify.verdict import Outcome, Verdict
from tests.receipts.made import ARITHMETIC
from tests.verify.test_recomputation import EOS, LAW, MODEL, Counting, options, verdict

MAX_TOKENS = 9


def honest(first: int, ends_at: int) -> dict[str, Any]:
    """Returns the changes that make a receipt of the counting system's answer to a prompt."""
    tokens = [*range(first + 1, ends_at), EOS][:MAX_TOKENS]
    return {
        "prompt": {"tokens": [7, first]},
        "options": options(max_tokens=MAX_TOKENS),
        "tokens": tokens,
        "finish": "stop" if tokens[-1] == EOS else "length",
    }


def said_of(receipt: dict[str, Any], stub: Counting) -> Verdict:
    """Returns what the counting system says of a receipt with these fields."""
    try:
        return asyncio.run(verdict(stub, **receipt))
    except Unreadable as error:
        return Verdict(place="", outcome=Outcome.UNCHECKED, why=str(error))


ANSWERS = st.integers(10, 30).flatmap(
    lambda first: st.tuples(st.just(first), st.integers(first + 1, first + 20))
)
"""Last token of a prompt, and the number at which the counting system ends its answer."""


@given(ANSWERS, st.data())
def test_a_changed_token_differs_at_its_index(answer: tuple[int, int], data: st.DataObject) -> None:
    receipt, stub = honest(*answer), Counting(ends_at=answer[1])
    assert said_of(receipt, stub).outcome is Outcome.SAME
    tokens = receipt["tokens"]
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**32 - 1).filter(lambda token: token != tokens[at]))
    told = [*tokens[:at], other, *tokens[at + 1 :]]
    said = said_of({**receipt, "tokens": told}, stub)
    assert (said.outcome, said.at) == (Outcome.DIFFERS, at)


@given(ANSWERS, st.data())
def test_a_missing_or_further_token_differs(answer: tuple[int, int], data: st.DataObject) -> None:
    receipt, stub = honest(*answer), Counting(ends_at=answer[1])
    tokens = receipt["tokens"]
    at = data.draw(st.integers(0, len(tokens) - 1))
    told = data.draw(
        st.sampled_from([tokens[:at] + tokens[at + 1 :], [*tokens[:at], 0, *tokens[at:]]])
    )
    said = said_of({**receipt, "tokens": told}, stub)
    if len(told) > MAX_TOKENS:
        assert (said.outcome, "options.max_tokens" in said.why) == (Outcome.UNCHECKED, True)
    else:
        assert said.outcome is Outcome.DIFFERS


@given(ANSWERS, st.integers(10, 30))
def test_a_changed_prompt_differs_at_the_first_token(answer: tuple[int, int], other: int) -> None:
    receipt = {**honest(*answer), "prompt": {"tokens": [7, other]}}
    said = said_of(receipt, Counting(ends_at=answer[1]))
    is_same = honest(other, answer[1])["tokens"] == receipt["tokens"]
    assert (said.outcome is Outcome.SAME) == is_same
    assert is_same or said.at is not None


@given(ANSWERS, st.integers(0, 20))
def test_another_limit_of_tokens_is_noticed(answer: tuple[int, int], limit: int) -> None:
    receipt = {**honest(*answer), "options": options(max_tokens=limit)}
    said = said_of(receipt, Counting(ends_at=answer[1]))
    n_tokens = len(receipt["tokens"])
    if limit < n_tokens:
        assert (said.outcome, "options.max_tokens" in said.why) == (Outcome.UNCHECKED, True)
    elif receipt["finish"] == "length" and limit > n_tokens:
        assert said.outcome is Outcome.DIFFERS
    else:
        assert said.outcome is Outcome.SAME


@given(
    st.sampled_from(["weights", "configuration", "tokenizer", "adapter", *ARITHMETIC]), st.data()
)
def test_one_digit_of_another_model_or_arithmetic_is_named(name: str, data: st.DataObject) -> None:
    def other(digest: str) -> str:
        at = data.draw(st.integers(0, len(digest) - 1))
        digits = string.hexdigits[:16].replace(digest[at], "")
        return digest[:at] + data.draw(st.sampled_from(digits)) + digest[at + 1 :]

    receipt = honest(10, 14)
    changes: dict[str, Any]
    if name in ARITHMETIC:
        changes = {"arithmetic": [{**ARITHMETIC, name: other(ARITHMETIC[name])}]}
        receipt["tokens"][0] += 1  # of equal tokens it would be a note
    elif name == "adapter":
        adapter = {**LAW, "digest": other(LAW["digest"])}
        changes = {"model": {**MODEL, "adapter": adapter}}
    else:
        changes = {"model": {**MODEL, name: other(MODEL[name])}}
    said = said_of({**receipt, **changes}, Counting(ends_at=14, adapter=LAW))
    assert (said.outcome, name in said.why) == (Outcome.UNCHECKED, True)
