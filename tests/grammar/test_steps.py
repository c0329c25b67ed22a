"""A step of an output in its grammar is cheap, or ends the output."""

import time
from pathlib import Path

import pytest

from services.frontend.request import output_format
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.grammar.grammars import Grammars
from tests.grammar.compiled import matcher_of

TOKENIZER = Path("models/demo/tokenizer.json")
VOCAB_SIZE, EOS = 4096, 1
N_STEPS = 40
EOS_ONLY = 1 << EOS

REAL = {
    "object": output_format.json_object(),
    "sums": 'start: e\ne: e ("+" | "-" | "*") e | "(" e ")" | /[0-9]+/ | /[a-z]+/',
    "schemas": output_format.json_schema(
        ClientSchema(
            {
                "anyOf": [
                    {"properties": {f"a{i}": {"type": "integer"} for i in range(n)}}
                    for n in range(30)
                ],
                "type": "object",
            },
            "schema",
        )
    ),
    "choices": output_format.choice([f"choice {i}" for i in range(1000)]),
}


@pytest.fixture(name="grammars", scope="module")
def make_grammars() -> Grammars:
    return Grammars(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


def steps(grammars: Grammars, grammar: str) -> int:
    """Returns how many tokens an output takes that goes on as long as it may."""
    matcher = matcher_of(grammars, grammar)
    for number in range(N_STEPS):
        mask = int.from_bytes(matcher.mask(), "little") & ~EOS_ONLY
        if not mask:
            assert not matcher.is_cut or grammar not in REAL.values()
            return number
        matcher.take(mask.bit_length() - 1)
    return N_STEPS


@pytest.mark.parametrize("grammar", REAL.values(), ids=REAL)
def test_outputs_of_real_grammars_go_on(grammars: Grammars, grammar: str) -> None:
    assert steps(grammars, grammar) > 1


@pytest.mark.parametrize("rule", ["a a", "a a a"], ids=["twice", "thrice"])
def test_outputs_of_ambiguous_grammars_end_before_they_are_slow(
    grammars: Grammars, rule: str
) -> None:
    began_at = time.process_time()
    n_steps = steps(grammars, f"start: a\na: {rule} | /[a-z ]/ | ")
    assert 1 < n_steps < N_STEPS
    assert time.process_time() - began_at < 2.0  # which were seconds for a step
