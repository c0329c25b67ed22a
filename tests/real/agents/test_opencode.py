"""opencode edits a file and runs a program."""

import json
from pathlib import Path

from tests.real.agents.conftest import NODE, PARROT, installed
from tests.real.conftest import Clients
from tests.scripted_parrot import Line, call
from tests.system.stack import Stack

LYNX = 'print("lynx", 1 + 2, "ears")\n'
MENDED = 'print("lynx", 1 + 1, "ears")\n'

SCRIPT = [
    Line(to="Generate a title", recalling="lynx", says="A lynx"),
    Line(to="lynx 2 ears", says="The lynx is mended."),
    Line(
        to="Edit applied",
        recalling="lynx",
        says=call("bash", command="python3 lynx.py", description="Counts ears"),
    ),
    Line(
        to='print("lynx", 1 + 2',
        says="Too many.\n" + call("edit", filePath="lynx.py", oldString="1 + 2", newString="1 + 1"),
    ),
    Line(to="Mend the lynx", says=call("read", filePath="lynx.py")),
]


def test_opencode_edits_a_file_and_runs_it(parrot: Stack, project: Path, home: Path) -> None:
    (project / "lynx.py").write_text(LYNX)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{parrot.http}/v1"},
        "models": {PARROT: {}},
    }
    config = {"permission": "allow", "share": "disabled", "provider": {"orcinus": provider}}
    (project / "opencode.json").write_text(json.dumps(config))
    printed = Clients(project, installed(NODE) / "opencode-linux-x64" / "bin").run(
        "opencode",
        "run",
        "--model",
        f"orcinus/{PARROT}",
        "Mend the lynx",
        HOME=str(home),
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
        OPENCODE_DISABLE_LSP_DOWNLOAD="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
    assert "The lynx is mended." in printed
    assert (project / "lynx.py").read_text() == MENDED
