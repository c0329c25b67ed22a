"""The public gRPC API serves clients of its baseline, and a change that would not is found."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).parents[1]
BUF = Path(sys.executable).parent / "buf"
INFERENCE, SAMPLING = "inference.proto", "sampling.proto"


BREAKS = [
    (INFERENCE, "bool echo = 21;", "int32 echo = 21;", 'Field "21" with name "echo"'),
    (INFERENCE, "int32 n = 12;", "int32 n = 50;", 'Previously present field "12" with name "n"'),
    (INFERENCE, "bool ignore_eos = 10;", "bool goes_on = 10;", 'changed name from "ignore_eos"'),
    (INFERENCE, "reserved 2 to 7,", "reserved 3 to 7,", "reserved range"),
    (INFERENCE, "FINISH_REASON_STOP = 1;", "FINISH_REASON_END = 1;", 'Enum value "1"'),
    (INFERENCE, "rpc Detokenize(Detok", "rpc ToText(Detok", 'RPC "Detokenize"'),
    (SAMPLING, "float min_p = 4;", "double min_p = 4;", 'from "float" to "double"'),
]
"""Changes that break clients: a file, a text in it, what takes its place, what is said of it."""


def breaks(root: Path) -> str:
    """Returns what `make proto-breaking` finds in a copy of the protos."""
    build: list[str | Path] = [
        BUF,
        "build",
        "--path",
        f"protos/orcinus/v1/{INFERENCE}",
        "--output",
        "-",
    ]
    image = subprocess.run(build, cwd=root, capture_output=True, check=True, timeout=HANG_S).stdout
    compare: list[str | Path] = [
        BUF,
        "breaking",
        "-",
        "--against",
        ROOT / "protos" / "baseline.txtpb",
    ]
    found = subprocess.run(compare, cwd=root, input=image, capture_output=True, timeout=HANG_S)
    assert bool(found.returncode) == bool(found.stdout)
    return found.stdout.decode()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the protos."""
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    folder = Path("protos") / "orcinus"
    shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def change(root: Path, name: str, old: str, new: str) -> None:
    path = root / "protos" / "orcinus" / "v1" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_the_api_serves_clients_of_the_baseline(copy: Path) -> None:
    assert breaks(copy) == ""


def test_changes_that_break_clients_are_found(copy: Path) -> None:
    for name, old, new, _ in BREAKS:
        change(copy, name, old, new)
    found = breaks(copy)
    assert [what for *_, what in BREAKS if what not in found] == []


def test_a_new_field_breaks_nobody(copy: Path) -> None:
    change(copy, INFERENCE, "bool echo = 21;", "bool echo = 21; optional bool more = 99;")
    assert breaks(copy) == ""
