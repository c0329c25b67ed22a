"""A checkpoint in the cache counts as complete only if it has all files that serving needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.hub.cache import complete_snapshot, folder_of
from services.hub.name import HubName
from tests.fake_hub import FakeHub, Repository, checkpoint
from tests.limits import HANG_S

COMMIT = "c0ffee" + "0" * 34
NAME = HubName("org/model", COMMIT)
POOLING = "1_Pooling/config.json"
MODULES = json.dumps([{"path": "", "type": "t.Transformer"}, {"path": "1_Pooling", "type": "t.P"}])


def snapshot(cache: Path, **others: str) -> Path:
    """Writes a checkpoint into a cache."""
    to = folder_of(NAME, cache) / "snapshots" / COMMIT
    files = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "w", **others}
    for path, content in files.items():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        (to / path).write_text(content)
    return to


@pytest.mark.parametrize(
    ("others", "is_complete"),
    [
        pytest.param({}, True, id="no-modules"),
        pytest.param({"modules.json": MODULES, POOLING: "{}"}, True, id="whole"),
        pytest.param({"modules.json": MODULES}, False, id="no-pooling"),
        pytest.param({"modules.json": MODULES[:9]}, False, id="half-a-list"),
        pytest.param({"modules.json": "[]"}, True, id="no-pooling-wanted"),
    ],
)
def test_an_embedding_model_needs_the_file_that_says_how_it_pools(
    tmp_path: Path, others: dict[str, str], is_complete: bool
) -> None:
    to = snapshot(tmp_path, **others)
    assert complete_snapshot(NAME, tmp_path) == (to if is_complete else None)


def test_a_file_that_an_interrupted_fetch_has_left_out_is_fetched(tmp_path: Path) -> None:
    to = snapshot(tmp_path / "cache")
    program = (
        "from pathlib import Path\n"
        "from services.hub.name import HubName\n"
        "from services.hub.snapshot import fetch\n"
        f"fetch(HubName({NAME.repository!r}, {COMMIT!r}), say=print,"
        f" cache=Path({str(tmp_path / 'cache')!r}))\n"
    )
    repository = Repository(checkpoint(b"w", **{"chat_template.jinja": b"{{ messages }}"}), COMMIT)
    with FakeHub({NAME.repository: repository}).serving() as hub:
        environment = hub.environment(tmp_path / "home")
        command = [sys.executable, "-c", program]
        subprocess.run(command, env=environment, check=True, timeout=HANG_S)
    assert (to / "chat_template.jinja").read_bytes() == b"{{ messages }}"
