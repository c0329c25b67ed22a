"""Claude Code edits a file, runs a program, and goes on after its conversation was compacted: by
the user, or because the prompt is too long."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.agents.conftest import NODE, PARROT, installed
from tests.real.conftest import Clients
from tests.scripted_parrot import Line, call
from tests.system.stack import Stack

HERON = 'print("heron", 2 + 2, "wings")\n'
MENDED = 'print("heron", 1 + 1, "wings")\n'
TOOLS = "Bash,Edit,Read"
DIARY = "Day {}: {} on the pond, and it rained in the evening.\n"
N_DAYS = {"first": 45, "second": 132}
"""Days of two diaries. Both are longer than the context; the second fits beside a summary of
the first. Claude Code keeps what came last if a quarter of its characters are at least the tokens
that are too many."""

SCRIPT = [
    Line(
        to="create a detailed summary",
        recalling="bitterns on the pond",
        says="<analysis>A diary.</analysis>\n<summary>First there were bitterns.</summary>",
    ),
    Line(
        to="grebes on the pond",
        recalling="First there were bitterns.",
        says="Bitterns, then grebes.",
    ),
    Line(to="bitterns on the pond", says="There were bitterns."),
    Line(to="Read the first diary", says=call("Read", file_path="first.txt")),
    Line(to="Read the second diary", says=call("Read", file_path="second.txt")),
    Line(
        to="create a detailed summary",
        recalling="heron",
        says="<analysis>A bird.</analysis>\n<summary>The heron has two wings again.</summary>",
    ),
    Line(
        to="How is the heron?",
        recalling="The heron has two wings again.",
        says="As the summary says, well.",
    ),
    Line(to="How is the heron?", says="I know of no heron."),
    Line(to="heron 2 wings", says="The heron is mended."),
    Line(
        to="heron.py has been updated",
        says=call("Bash", command="python3 heron.py", description="Counts wings"),
    ),
    Line(
        to='print("heron", 2 + 2',
        says="Too many.\n"
        + call("Edit", file_path="heron.py", old_string="2 + 2", new_string="1 + 1"),
    ),
    Line(to="Mend the heron", says=call("Read", file_path="heron.py")),
]


@pytest.fixture
def claude(parrot: Stack, project: Path, home: Path) -> "Claude":
    (project / "heron.py").write_text(HERON)
    return Claude(Clients(project, installed(NODE) / ".bin"), home, parrot.http)


class Claude:
    """Claude Code without a terminal."""

    def __init__(self, clients: Clients, home: Path, url: str) -> None:
        self._clients = clients
        self._environment = {
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_MODEL": PARROT,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": PARROT,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }

    def ask(self, prompt: str, *options: str) -> dict[str, Any]:
        """Returns the result of one prompt: `result` is the last answer."""
        command = ("claude", "-p", prompt, "--output-format", "json", *options)
        printed = self._clients.run(*command, **self._environment)
        result: dict[str, Any] = json.loads(printed)
        assert not result["is_error"], result
        return result


def test_claude_code_edits_a_file_and_runs_it(claude: Claude, project: Path) -> None:
    result = claude.ask("Mend the heron", "--allowedTools", TOOLS)
    assert result["result"] == "The heron is mended."
    assert (project / "heron.py").read_text() == MENDED
    assert result["num_turns"] == 4


def test_claude_code_goes_on_after_a_compaction(claude: Claude) -> None:
    claude.ask("Mend the heron", "--allowedTools", TOOLS)
    claude.ask("/compact", "--continue")
    assert claude.ask("How is the heron?", "--continue")["result"] == "As the summary says, well."


def test_claude_code_compacts_a_prompt_that_is_too_long(claude: Claude, project: Path) -> None:
    for name, birds in (("first", "bitterns"), ("second", "grebes")):
        days = (DIARY.format(day, birds) for day in range(N_DAYS[name]))
        (project / f"{name}.txt").write_text("".join(days))
    claude.ask("Read the first diary", "--allowedTools", TOOLS)
    result = claude.ask("Read the second diary", "--continue", "--allowedTools", TOOLS)
    assert result["result"] == "Bitterns, then grebes."
