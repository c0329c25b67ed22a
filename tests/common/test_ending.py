"""How a service says why it ends."""

import json
import os
from pathlib import Path

import pytest

from services.common.cannot_start import CannotStart
from services.common.ending import give_up, ready_fd_of


def test_a_service_alone_says_it_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert give_up(CannotStart("stages: too\n many"), ready_fd=None) == 1
    assert capsys.readouterr() == ("", "error: stages: too many\n")


def test_a_file_is_named_before_what_the_system_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="No such") as error:
        (tmp_path / "keys").read_text(encoding="utf-8")
    give_up(error.value, ready_fd=None)
    assert capsys.readouterr().err == f"error: {tmp_path / 'keys'}: No such file or directory\n"


def test_a_launcher_hears_it_and_nobody_else(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    give_up("why", ready_fd=writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert json.load(pipe) == {"error": "why"}
    assert capsys.readouterr() == ("", "")
    give_up("why", ready_fd=writing)  # no error although the pipe is closed


def test_machines_get_it_in_their_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    give_up("why", ready_fd=None, log_format="json")
    assert caplog.messages == ["why"]
    assert not capsys.readouterr().err.startswith("error:")


@pytest.mark.parametrize(
    ("arguments", "fd"),
    [(["--ready-fd=7"], 7), (["--stages", "x", "--ready-fd=x"], None), ([], None)],
)
def test_the_pipe_is_found_in_a_command_line_that_is_wrong(
    arguments: list[str], fd: int | None
) -> None:
    assert ready_fd_of(arguments) == fd
