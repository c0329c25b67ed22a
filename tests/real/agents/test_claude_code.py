"""Claude Code edits a file, runs a program, and goes on after its conversation was compacted."""

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

SCRIPT = [
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
