"""Codex edits a file, by its shell or by a tool of free text, runs a program, and goes on after its
conversation was compacted."""

import json
from pathlib import Path

import pytest

from tests.real.agents.conftest import NODE, PARROT, installed
from tests.real.conftest import Clients
from tests.scripted_parrot import Line, call
from tests.system.stack import Stack

OTTER = 'print("otter", 2 + 3, "legs")\n'
MENDED = 'print("otter", 2 + 2, "legs")\n'
PATCH = """\
*** Begin Patch
*** Update File: otter.py
@@
-print("otter", 2 + 3, "legs")
+print("otter", 2 + 2, "legs")
*** End Patch
"""

KNOWN_MODEL = {
    "slug": PARROT,
    "display_name": "Parrot",
    "description": "Repeats what it reads.",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
    "base_instructions": "Mend what is broken.",
    "supported_reasoning_levels": [],
    "default_reasoning_summary": "none",
    "supports_reasoning_summaries": False,
    "support_verbosity": False,
    "supports_parallel_tool_calls": False,
    "shell_type": "unified_exec",
    "apply_patch_tool_type": "freeform",
    "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "context_window": 16_384,
    "experimental_supported_tools": [],
}
"""A model in the words of Codex's catalogue, that gets patches by a tool of free text."""

SCRIPT = [
    Line(
        to="CONTEXT CHECKPOINT COMPACTION",
        recalling="otter",
        says="Summary: the otter has four legs again.",
    ),
    Line(
        to="How is the otter?",
        recalling="Summary: the otter has four legs again.",
        says="As the summary says, well.",
    ),
    Line(to="How is the otter?", says="I know of no summary."),
    Line(to="otter 4 legs", says="The otter is mended."),
    Line(to="M otter.py", says=call("exec_command", cmd="python3 otter.py")),
    Line(to="Patch the otter", says=call("apply_patch", input=PATCH)),
    Line(
        to="Mend the otter",
        says="Too many.\n" + call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}EOF\n"),
    ),
]


@pytest.fixture
def codex(parrot: Stack, project: Path, home: Path) -> "Codex":
    (project / "otter.py").write_text(OTTER)
    return Codex(Clients(project, installed(NODE) / ".bin"), home, parrot.http)


class Codex:
    """Codex without a terminal."""

    def __init__(self, clients: Clients, home: Path, url: str) -> None:
        self._clients = clients
        self._home = home
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(f"""
model = "{PARROT}"
model_provider = "orcinus"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
analytics.enabled = false

[model_providers.orcinus]
name = "Orcinus"
base_url = "{url}/v1"
wire_api = "responses"
""")

    def ask(self, *arguments: str) -> str:
        """Returns the last answer to a prompt."""
        answer = self._home / "answer"
        options = ("--skip-git-repo-check", "--output-last-message", str(answer))
        self._clients.run("codex", "exec", *arguments, *options, HOME=str(self._home))
        return answer.read_text()


def test_codex_edits_a_file_and_runs_it(codex: Codex, project: Path) -> None:
    assert codex.ask("Mend the otter") == "The otter is mended."
    assert (project / "otter.py").read_text() == MENDED


def test_codex_goes_on_after_a_compaction(codex: Codex) -> None:
    codex.ask("Mend the otter")
    limit = "model_auto_compact_token_limit=1000"
    question = "How is the otter?"
    answer = codex.ask("resume", "--last", "--config", limit, question)
    assert answer == "As the summary says, well."


def test_codex_edits_a_file_by_a_tool_of_free_text(codex: Codex, project: Path, home: Path) -> None:
    catalogue = home / "models.json"
    catalogue.write_text(json.dumps({"models": [KNOWN_MODEL]}))
    answer = codex.ask("--config", f'model_catalog_json="{catalogue}"', "Patch the otter")
    assert answer == "The otter is mended."
    assert (project / "otter.py").read_text() == MENDED
