"""Instructor gets objects in each mode that it has for the protocols of OpenAI and Anthropic."""

import json

import pytest

from tests.real.agents.conftest import Sdks
from tests.scripted_parrot import Line, call

POND = {"bird": "teal", "n_feet": 2}
SECOND = {"bird": "smew", "n_feet": 2}
BY_CALLS = ["TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"]
BY_TEXT = ["JSON", "JSON_SCHEMA", "MD_JSON"]

SCRIPT = [
    Line(
        to=": PARALLEL_TOOLS.",
        recalling="The teal wants an object",
        says=call("Pond", **POND) + "\n" + call("Pond", **SECOND),
    ),
    *(
        Line(to=f": {mode}.", recalling="The teal wants an object", says=call("Pond", **POND))
        for mode in BY_CALLS
    ),
    Line(
        to=": MD_JSON.",
        recalling="The teal wants an object",
        says=f"```json\n{json.dumps(POND)}\n```",
    ),
    Line(to="The teal wants an object", says=json.dumps(POND)),
]


@pytest.mark.parametrize("mode", [*BY_CALLS, *BY_TEXT])
def test_instructor_gets_an_object_from_openais_api(sdks: Sdks, mode: str) -> None:
    assert sdks.outcome("instructor", "openai", mode) == POND


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor_gets_an_object_from_anthropics_api(sdks: Sdks, mode: str) -> None:
    assert sdks.outcome("instructor", "anthropic", mode) == POND


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_instructor_gets_several_objects(sdks: Sdks, api: str) -> None:
    assert sdks.outcome("instructor", api, "PARALLEL_TOOLS") == [POND, SECOND]
