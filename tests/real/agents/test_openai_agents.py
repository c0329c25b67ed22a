"""The OpenAI Agents SDK calls tools and gets objects over both of its protocols."""

import json

import pytest

from tests.real.agents.conftest import Sdks
from tests.scripted_parrot import Line, call

NEST = {"bird": "stork", "n_eggs": 5}
ANSWER = "There are five."
OUTCOMES = {"whole": ANSWER, "streamed": ANSWER, "an_object": NEST}

SCRIPT = [
    Line(to="5 eggs", recalling="The stork wants an object.", says=json.dumps(NEST)),
    Line(to="5 eggs", says=ANSWER),
    Line(to="The stork wants an object.", says=call("count_eggs", bird="stork")),
    Line(to="How many eggs has the stork?", says=call("count_eggs", bird="stork")),
]


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("case", OUTCOMES)
def test_openai_agents_go_on_after_a_call(sdks: Sdks, api: str, case: str) -> None:
    assert sdks.outcome("openai_agents", api, case) == OUTCOMES[case]
