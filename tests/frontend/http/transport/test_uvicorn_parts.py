"""The undocumented parts of uvicorn that the HTTP server uses; a new version may change them.

Where one of these tests fails after an upgrade, compare `httptools_impl.py` and `flow_control.py`
of both versions, run `make test-hostile`, and only then name the new version in
`requirements/frontend.in`.
"""

import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import flow_control
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

ROOT = Path(__file__).parents[4]

CYCLE_ARGUMENTS = [
    "scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers",
    "message_event", "expect_100_continue", "keep_alive", "on_response",
]  # fmt: skip
CYCLE_STATE = {
    "body": bytearray(),
    "chunked_encoding": None,
    "disconnected": False,
    "expected_content_length": 0,
    "more_body": True,
    "response_complete": False,
    "response_started": False,
}
"""Attributes of a new cycle that are read or set, with their first values."""


def test_uvicorn_is_the_version_whose_parts_are_used() -> None:
    lines = (ROOT / "requirements" / "frontend.in").read_text().splitlines()
    [pinned] = [line.partition(" ")[0] for line in lines if line.startswith("uvicorn")]
    assert pinned == f"uvicorn=={uvicorn.__version__}"
    assert re.search(rf"^{re.escape(pinned)}$", (ROOT / "constraints.txt").read_text(), re.M)


def new_cycle() -> RequestResponseCycle:
    arguments: dict[str, Any] = dict.fromkeys(CYCLE_ARGUMENTS)
    return RequestResponseCycle(
        **arguments | {"message_event": asyncio.Event(), "keep_alive": True}
    )


def test_a_cycle_takes_the_arguments_that_it_is_given() -> None:
    parameters = list(inspect.signature(RequestResponseCycle.__init__).parameters)
    assert parameters == ["self", *CYCLE_ARGUMENTS]
    assert list(inspect.signature(RequestResponseCycle.run_asgi).parameters) == ["self", "app"]


@pytest.mark.parametrize("name", CYCLE_STATE)
def test_a_cycle_begins_with_the_state_that_is_relied_on(name: str) -> None:
    assert vars(new_cycle())[name] == CYCLE_STATE[name]


@pytest.mark.parametrize("name", ["scope", "keep_alive", "message_event", "on_response"])
def test_a_cycle_keeps_what_it_is_given_under_its_name(name: str) -> None:
    assert name in vars(new_cycle())


class Pausing(asyncio.Transport):
    """A transport that counts pauses."""

    n_pauses = 0

    def pause_reading(self) -> None:
        self.n_pauses += 1

    def resume_reading(self) -> None:
        self.n_pauses -= 1


def test_flow_control_tells_what_is_paused_and_passes_it_on_once() -> None:
    transport = Pausing()
    flow = FlowControl(transport)
    assert (flow.read_paused, flow.write_paused) == (False, False)
    for _ in range(2):
        flow.pause_reading()
        flow.pause_writing()
    assert (flow.read_paused, flow.write_paused, transport.n_pauses) == (True, True, 1)
    for _ in range(2):
        flow.resume_reading()
        flow.resume_writing()
    assert (flow.read_paused, flow.write_paused, transport.n_pauses) == (False, False, 0)
    assert flow_control.HIGH_WATER_LIMIT == 2**16
