"""The frontend's list of adapters, and its commands to the scheduler."""

import asyncio
from collections.abc import Mapping

import pytest
from orcinus.v1 import scheduler_pb2
from orcinus.v1.scheduler_pb2 import AdapterOutcome

from services.common import errors
from services.common.adapter_list import AdapterList
from services.common.adapter_list_proto import from_proto, to_proto
from services.frontend.link.adapter_link import AdapterLink

DIGEST = "d" * 64


class Frontend:
    """A frontend's link, and what it sends."""

    def __init__(self, limit_s: float = 60) -> None:
        self.sent: list[scheduler_pb2.ConnectRequest] = []
        self.known: Mapping[str, str] = {}
        self.link = AdapterLink(self.sent.append, self._note, limit_s=limit_s)
        self.link.open()

    def _note(self, digests: Mapping[str, str]) -> None:
        self.known = digests

    def answer(self, outcome: AdapterOutcome, message: str = "", field: str = "") -> None:
        """Lets the scheduler answer the last command."""
        response = scheduler_pb2.ConnectResponse()
        command_id = self.sent[-1].adapter_command.command_id
        response.adapter_answers.add(
            command_id=command_id, outcome=outcome, message=message, field=field
        )
        self.link.take(response)


async def test_the_next_scheduler_gets_the_list_before_anything_else() -> None:
    frontend, leader = Frontend(), AdapterList()
    assert not frontend.sent  # there is nothing to tell
    leader.put("law", "/a", DIGEST)
    leader.put("medicine", "/b", DIGEST)
    leader.remove("medicine")
    frontend.link.take(scheduler_pb2.ConnectResponse(adapters=to_proto(leader.entries)))
    assert frontend.known == {"law": DIGEST}
    frontend.link.lose()
    frontend.link.open()
    assert tuple(from_proto(frontend.sent[0].adapters)) == leader.entries


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (AdapterOutcome.ADAPTER_OUTCOME_INVALID, errors.InvalidRequest),
        (AdapterOutcome.ADAPTER_OUTCOME_FULL, errors.PoolFull),
        (AdapterOutcome.ADAPTER_OUTCOME_UNAVAILABLE, errors.Unavailable),
        (AdapterOutcome.ADAPTER_OUTCOME_UNKNOWN, errors.UnknownAdapter),
        (AdapterOutcome.ADAPTER_OUTCOME_UNSPECIFIED, errors.Unavailable),
    ],
)
async def test_answers_are_errors_of_the_tree(
    outcome: AdapterOutcome, error: type[errors.OrcinusError]
) -> None:
    frontend = Frontend()
    waiting = asyncio.create_task(frontend.link.load("law", "/a"))
    await asyncio.sleep(0)
    frontend.answer(outcome, "why", "lora_path")
    with pytest.raises(error, match="why"):
        await waiting


async def test_commands_end_well() -> None:
    frontend = Frontend()
    for waiting in (frontend.link.load("law", "/a"), frontend.link.unload("law")):
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0)
        frontend.answer(AdapterOutcome.ADAPTER_OUTCOME_DONE)
        await task
    first, second = (one.adapter_command for one in frontend.sent)
    assert (first.name, first.source) == ("law", "/a")
    assert (second.name, second.source) == ("law", "")
    assert first.command_id != second.command_id


async def test_no_command_waits_for_a_scheduler_that_is_gone() -> None:
    frontend = Frontend()
    waiting = asyncio.create_task(frontend.link.load("law", "/a"))
    await asyncio.sleep(0)
    frontend.link.lose()
    with pytest.raises(errors.Unavailable):
        await waiting
    with pytest.raises(errors.Unavailable):
        await frontend.link.load("law", "/a")
    frontend.link.open()
    frontend.answer(AdapterOutcome.ADAPTER_OUTCOME_DONE)  # too late: no client waits


async def test_a_scheduler_that_does_not_answer_is_not_waited_for() -> None:
    frontend = Frontend(limit_s=0.01)
    with pytest.raises(errors.Unavailable, match="in time"):
        await frontend.link.load("law", "/a")
