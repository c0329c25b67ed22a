"""`orcinus receipt-key` makes keys, and rotates them."""

import stat
from pathlib import Path

import pytest

from services.cli.receipt_key import main
from services.receipts.keys import SigningKeys


def test_a_key_is_made_for_its_owner_and_rotated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.pem"
    assert main([str(file)]) == 0
    first = capsys.readouterr().out.strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [*SigningKeys.parse(file.read_bytes()).published.by_id] == [first]
    assert main([str(file)]) == 1
    assert "--rotate" in capsys.readouterr().err
    assert main(["--rotate", str(file)]) == 0
    second = capsys.readouterr().out.strip()
    keys = SigningKeys.parse(file.read_bytes())
    assert (keys.id, [*keys.published.by_id]) == (second, [second, first])
    assert [path.name for path in tmp_path.iterdir()] == ["keys.pem"]


def test_no_key_is_left_behind_if_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    assert main([str(tmp_path / "keys.pem")]) == 1
    assert "no space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_only_keys_are_rotated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    assert main(["--rotate", str(file)]) == 1
    assert "has no key in PEM" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main(["--rotate", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
