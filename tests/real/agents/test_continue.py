"""Continue edits a file and runs a program."""

import json
from pathlib import Path

from tests.real.agents.conftest import NODE, PARROT, installed
from tests.real.conftest import Clients
from tests.scripted_parrot import Line, call
from tests.system.stack import Stack

NEWT = 'print("newt", 3 + 2, "legs")\n'
MENDED = 'print("newt", 2 + 2, "legs")\n'

SCRIPT = [
    Line(to="newt 4 legs", says="The newt is mended."),
    Line(to="Successfully edited", recalling="newt", says=call("Bash", command="python3 newt.py")),
    Line(
        to='print("newt", 3 + 2',
        says="Too many.\n"
        + call("Edit", file_path="newt.py", old_string="3 + 2", new_string="2 + 2"),
    ),
    Line(to="Mend the newt", says=call("Read", filepath="newt.py")),
]


def test_continue_edits_a_file_and_runs_it(parrot: Stack, project: Path, home: Path) -> None:
    (project / "newt.py").write_text(NEWT)
    model = {
        "name": "Orcinus",
        "provider": "openai",
        "model": PARROT,
        "apiBase": f"{parrot.http}/v1",
        "apiKey": "none",
        "capabilities": ["tool_use"],
    }
    config = home / "config.yaml"  # JSON is YAML
    config.write_text(json.dumps({"name": "Test", "version": "1.0.0", "models": [model]}))
    printed = Clients(project, installed(NODE) / ".bin").run(
        "cn",
        "--print",
        "--auto",
        "--config",
        config,
        "Mend the newt",
        HOME=str(home),
        CONTINUE_CLI_ENABLE_TELEMETRY="0",
    )
    assert "The newt is mended." in printed
    assert (project / "newt.py").read_text() == MENDED
