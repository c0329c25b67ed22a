"""aider edits a file, runs its test, and edits the file again when the test fails."""

from pathlib import Path

from tests.real.agents.conftest import AIDER, PARROT, installed
from tests.real.conftest import Clients
from tests.scripted_parrot import Line
from tests.system.stack import Stack

IBIS = "n_eggs = {}\nassert n_eggs == 1 + 2\n"


def edit(old: str, new: str) -> str:
    return f"ibis.py\n```python\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"


SCRIPT = [
    Line(to="AssertionError", recalling="ibis", says=edit("n_eggs = 2", "n_eggs = 3")),
    Line(to="Feed the ibis", says="One more.\n\n" + edit("n_eggs = 1", "n_eggs = 2")),
]


def test_aider_edits_a_file_until_its_test_passes(parrot: Stack, project: Path, home: Path) -> None:
    (project / "ibis.py").write_text(IBIS.format(1))
    Clients(project, installed(AIDER)).run(
        "aider",
        f"--model=openai/{PARROT}",
        "--edit-format=diff",
        "--yes-always",
        "--no-git",
        "--no-check-update",
        "--no-show-model-warnings",
        "--analytics-disable",
        "--test-cmd=python3 ibis.py",
        "--auto-test",
        "--message=Feed the ibis",
        "ibis.py",
        HOME=str(home),
        OPENAI_API_BASE=f"{parrot.http}/v1",
    )
    assert (project / "ibis.py").read_text() == IBIS.format(3)
