"""The Vercel AI SDK calls tools and gets objects over each of its three protocols."""

import json
from typing import Any

import pytest

from tests.real.agents.conftest import Sdks
from tests.scripted_parrot import Line, call

PROTOCOLS = ["responses", "chat", "messages"]
LAKE = {"lake": "Como", "metres": 400}

# Over Anthropic's protocol the SDK makes the object a call, for models that it does not know.
SCRIPT = [
    Line(to="400 m deep", recalling="depth by messages", says=call("json", **LAKE)),
    Line(to="400 m deep", recalling="The grebe wants an object", says=json.dumps(LAKE)),
    Line(to="400 m deep", says="It is 400 metres deep."),
    Line(to="The grebe wants an object with a depth", says=call("depth", lake="Como")),
    Line(to="The grebe wants an object by messages", says=call("json", **LAKE)),
    Line(to="The grebe wants an object", says=json.dumps(LAKE)),
    Line(to="How deep is the lake of the grebe?", says="I look.\n" + call("depth", lake="Como")),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", ["whole", "streamed"])
def test_the_sdk_goes_on_after_a_call(sdks: Sdks, protocol: str, case: str) -> None:
    answer: Any = sdks.outcome("vercel_ai", protocol, case)
    assert answer["results"] == ["400 m deep"]
    assert answer["text"].endswith("It is 400 metres deep.")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", ["object", "object_after_call"])
def test_the_sdk_gets_an_object(sdks: Sdks, protocol: str, case: str) -> None:
    assert sdks.outcome("vercel_ai", protocol, case) == LAKE
