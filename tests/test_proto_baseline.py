"""The public gRPC API serves clients of its baseline, and a change that would not is found."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUF = Path(sys.executable).parent / "buf"
INFERENCE, SAMPLING = "inference.proto", "sampling.proto"


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
    image = subprocess.run(build, cwd=root, capture_output=True, check=True, timeout=60).stdout
    compare: list[str | Path] = [
        BUF,
        "breaking",
        "-",
        "--against",
        ROOT / "protos" / "baseline.txtpb",
    ]
    found = subprocess.run(compare, cwd=root, input=image, capture_output=True, timeout=60)
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


@pytest.mark.parametrize(
    ("name", "old", "new", "found"),
    [
        (INFERENCE, "bool echo = 18;", "int32 echo = 18;", "changed type"),
        (INFERENCE, "bool echo = 18;", "bool echo = 19;", 'field "18" with name "echo"'),
        (INFERENCE, "bool echo = 18;", "bool prefix = 18;", "changed name"),
        (INFERENCE, "reserved 2 to 7,", "reserved 3 to 7,", "reserved range"),
        (INFERENCE, "FINISH_REASON_STOP = 1;", "FINISH_REASON_END = 1;", "Enum value"),
        (INFERENCE, "rpc Detokenize(Detok", "rpc ToText(Detok", 'RPC "Detokenize"'),
        (SAMPLING, "float min_p = 4;", "double min_p = 4;", "changed type"),
    ],
    ids=["type", "number", "name", "reserved", "enum", "rpc", "imported"],
)
def test_a_change_that_breaks_clients_is_found(
    copy: Path, name: str, old: str, new: str, found: str
) -> None:
    change(copy, name, old, new)
    assert found in breaks(copy)


def test_a_new_field_breaks_nobody(copy: Path) -> None:
    change(copy, INFERENCE, "bool echo = 18;", "bool echo = 18; optional bool more = 99;")
    assert breaks(copy) == ""
