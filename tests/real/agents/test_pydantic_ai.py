"""Pydantic AI calls tools and gets objects in each way, over each of its three protocols."""

import json

import pytest

from tests.real.agents.conftest import Sdks
from tests.scripted_parrot import Line, call

BURROW = {"bird": "puffin", "n_chicks": 6, "notes": {}, "found_by": None}
ANSWER = "There are six."
OUTCOMES = {"whole": ANSWER, "streamed": ANSWER, "by_tool": BURROW, "prompted": BURROW}

SCRIPT = [
    Line(to="6 chicks", recalling="an object by a tool.", says=call("final_result", **BURROW)),
    Line(to="6 chicks", recalling="The puffin wants an object.", says=json.dumps(BURROW)),
    Line(to="6 chicks", says=ANSWER),
    Line(to="The puffin wants an object", says=call("count_chicks", bird="puffin")),
    Line(to="How many chicks has the puffin?", says=call("count_chicks", bird="puffin")),
]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("case", OUTCOMES)
def test_pydantic_ai_goes_on_after_a_call(sdks: Sdks, api: str, case: str) -> None:
    assert sdks.outcome("pydantic_ai", api, case) == OUTCOMES[case]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai_gets_an_object_in_the_apis_own_way(sdks: Sdks, api: str) -> None:
    assert sdks.outcome("pydantic_ai", api, "native") == BURROW
