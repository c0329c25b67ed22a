"""Commands to load and unload adapters: each is answered once, and none waits for ever."""

import asyncio

import pytest
from orcinus.v1 import scheduler_pb2
from orcinus.v1.scheduler_pb2 import AdapterOutcome

from services.common.adapter_list import AdapterEntry
from services.common.adapters import adapter_traits
from services.scheduler.adapter_commands import MAX_COMMANDS, AdapterCommands, Answer
from services.scheduler.core.admission.adapter_gate import SharedAdapters

DONE = AdapterOutcome.ADAPTER_OUTCOME_DONE
DIGEST = "d" * 64


class Leader:
    """Commands of a leader whose pipelines do what the test says."""

    def __init__(self, *, max_loaded: int = 2, limit_s: float = 60) -> None:
        self.told: list[AdapterEntry] = []
        self.answers: dict[str, Answer] = {}
        self.shared = SharedAdapters()
        self.commands = AdapterCommands(on_change=self.told.extend, limit_s=limit_s)
        self.commands.serve(self.shared, lambda: None)
        traits = adapter_traits({"fixed": "f" * 64}, max_loaded=max_loaded)
        self.commands.note_pipeline(scheduler_pb2.PipelineDescription(model="base", traits=traits))

    def order(self, name: str, source: str = "", *, key: str = "") -> None:
        command = scheduler_pb2.AdapterCommand(name=name, source=source)
        answer = key or name
        assert answer not in self.answers

        def on_answer(said: Answer) -> None:
            assert answer not in self.answers  # once
            self.answers[answer] = said

        self.commands.carry_out(command, on_answer)

    def load(self, name: str, digest: str = DIGEST) -> Answer:
        self.order(name, "/adapters/x")
        self.shared.wanted[0].on_end(digest, "")
        return self.answers[name]


async def test_an_adapter_is_known_when_a_pipeline_has_loaded_it() -> None:
    leader = Leader()
    leader.order("law", "/adapters/law")
    (wanted,) = leader.shared.wanted
    assert (wanted.name, wanted.source) == ("law", "/adapters/law")
    assert not leader.answers
    assert not leader.told
    wanted.on_end(DIGEST, "")
    assert leader.answers["law"].outcome == DONE
    assert leader.shared.sources.source_of(DIGEST) == leader.told[0]
    assert not leader.shared.wanted


async def test_a_broken_adapter_is_never_known() -> None:
    leader = Leader()
    leader.order("law", "/adapters/law")
    leader.shared.wanted[0].on_end("", "broken")
    assert leader.answers["law"] == Answer(
        AdapterOutcome.ADAPTER_OUTCOME_INVALID, "broken", "lora_path"
    )
    assert not leader.commands.list.entries  # failures take no memory
    assert not leader.shared.wanted


@pytest.mark.parametrize(
    ("name", "source", "field"),
    [
        ("a name", "/a", "lora_name"),
        ("", "/a", "lora_name"),
        ("base", "/a", "lora_name"),
        ("fixed", "/a", "lora_name"),
        ("known", "/a", "lora_name"),
        ("law", "acme/law", "lora_path"),
        ("law", "s3://bucket/law", "lora_path"),
        ("law", "/" + "a" * 2000, "lora_path"),
    ],
)
async def test_wrong_commands_are_refused_by_field(name: str, source: str, field: str) -> None:
    leader = Leader()
    leader.load("known")
    leader.order(name, source, key="wrong")
    answer = leader.answers["wrong"]
    assert answer.outcome == AdapterOutcome.ADAPTER_OUTCOME_INVALID
    assert answer.field == field
    assert not leader.shared.wanted


async def test_a_name_is_loaded_once_at_a_time() -> None:
    leader = Leader()
    leader.order("law", "/a", key="first")
    leader.order("law", "/b", key="second")
    assert leader.answers["second"].outcome == AdapterOutcome.ADAPTER_OUTCOME_INVALID
    assert "first" not in leader.answers


async def test_commands_in_progress_are_bounded() -> None:
    leader = Leader()
    for number in range(MAX_COMMANDS + 3):
        leader.order(f"a{number}", "/a")
    assert {answer.outcome for answer in leader.answers.values()} == {
        AdapterOutcome.ADAPTER_OUTCOME_FULL
    }
    assert len(leader.shared.wanted) == MAX_COMMANDS
    leader.commands.close()
    assert len(leader.answers) == MAX_COMMANDS + 3
    assert not leader.shared.wanted


async def test_a_command_that_no_pipeline_carries_out_ends() -> None:
    leader = Leader(limit_s=0.01)
    leader.order("law", "/a")
    async with asyncio.timeout(20):
        while not leader.answers:
            await asyncio.sleep(0.01)
    assert leader.answers["law"].outcome == AdapterOutcome.ADAPTER_OUTCOME_UNAVAILABLE
    assert not leader.shared.wanted


async def test_workers_that_load_nothing_get_no_orders() -> None:
    leader = Leader(max_loaded=0)
    leader.order("law", "/a")
    assert leader.answers["law"].outcome == AdapterOutcome.ADAPTER_OUTCOME_INVALID
    assert "allowed_adapter_sources" in leader.answers["law"].message


async def test_unloading_forgets_the_name_only() -> None:
    leader = Leader()
    leader.load("law")
    leader.load("again")
    leader.order("law", key="unload")
    assert leader.answers["unload"].outcome == DONE
    assert leader.told[-1].is_removed
    assert leader.shared.sources.source_of(DIGEST) is not None  # the other name has it
    leader.order("law", key="twice")
    assert leader.answers["twice"].outcome == AdapterOutcome.ADAPTER_OUTCOME_UNKNOWN
    leader.order("fixed", key="fixed")
    assert leader.answers["fixed"].outcome == AdapterOutcome.ADAPTER_OUTCOME_INVALID


async def test_the_next_leader_goes_on_with_the_lists_of_frontends() -> None:
    first, second = Leader(), Leader()
    first.load("law")
    second.commands.merge(first.commands.list.entries)
    assert second.commands.list.get("law") == first.commands.list.get("law")
    assert second.told == list(first.commands.list.entries)  # and tells the other frontends
    second.commands.merge(first.commands.list.entries)
    assert len(second.told) == 1


@pytest.mark.parametrize(
    "entry",
    [
        AdapterEntry(1, False, "a name", "/a", DIGEST),
        AdapterEntry(1, False, "law", "acme/law", DIGEST),
        AdapterEntry(1, False, "law", "/a", DIGEST * 2),
        AdapterEntry(2**63, False, "law", "/a", DIGEST),
    ],
)
async def test_entries_that_no_leader_makes_are_left_out(entry: AdapterEntry) -> None:
    leader = Leader()
    leader.commands.merge([entry])
    assert not leader.commands.list.entries
