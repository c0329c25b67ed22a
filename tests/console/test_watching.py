"""The command shows a stream, through losses of it, or a recording, on terminals and elsewhere."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.console.events import STORY, Event, iteration, mark, told, write_recording
from tests.fake_http import serving_http
from tests.limits import HANG_S

KEY = "sk-secret"


@dataclass(slots=True)
class Stage:
    """What the fake frontend plays: the events of each call in turn, the last one held open."""

    plays: Sequence[Sequence[Event]]
    status: int = 200
    calls: list[str | None] = field(default_factory=list)
    """The `Authorization` of each call."""
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    @contextmanager
    def playing(self) -> Iterator["Stage"]:
        with serving_http(_Handler, released=self.released, stage=self) as self.url:
            yield self


class _Handler(BaseHTTPRequestHandler):
    stage: Stage

    def do_GET(self) -> None:
        stage = self.stage
        assert self.path == "/pipeline/events"
        stage.calls.append(self.headers["Authorization"])
        n_calls = len(stage.calls)
        self.send_response(stage.status)
        self.end_headers()
        if stage.status != 200:
            self.wfile.write(json.dumps({"error": {"message": "show a key"}}).encode())
            return
        self.wfile.write(b": hello\n\n")
        for event in told(*stage.plays[min(n_calls, len(stage.plays)) - 1]):
            self.wfile.write(f"id: 7\ndata: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()
        if n_calls >= len(stage.plays):
            stage.released.wait(HANG_S)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.console", *arguments],
        text=True,
        env={**os.environ, "KEY": KEY, "TZ": "UTC"},
        **options,
    )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.console", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "TZ": "UTC"},
        check=False,
    )


def test_a_recording_becomes_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    later = [iteration(1.6, 5, {1: (1, "d", 10), 3: (1, "d", 10)}), mark(3.0, "lost", "stage 1", 1)]
    path = write_recording(tmp_path / "run.jsonl", [*STORY, *later])
    done = run("--file", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first.endswith(" epoch: 3, demo on 2 stages")
    assert second.endswith(" in flight  batch 2.0  K/V 40%")
    assert third == "14:13:23 lost: stage 1 (requests 1)"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["{}"], "line 1 is not that of a recording"),
        (['{"type": "recording", "version": 2}', "nonsense"], "line 2 is no JSON"),
        (['{"type": "recording", "version": 2}', '{"type": "pool"}'], "a broken event"),
    ],
    ids=["header", "json", "event"],
)
@pytest.mark.thorough
def test_what_is_no_recording_is_refused(tmp_path: Path, lines: list[str], reason: str) -> None:
    path = tmp_path / "file"
    path.write_text("\n".join(lines))
    done = run("--file", str(path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert reason in done.stderr


@pytest.mark.thorough
def test_a_file_that_is_not_there_and_a_variable_that_is_not_set_are_named() -> None:
    assert run("--file", "/no/where").stderr.startswith("error: ")
    done = run("--key-env", "NOBODY_SETS_THIS")
    assert done.stderr == "error: the variable NOBODY_SETS_THIS is not set\n"
    assert run("--url", "ftp://x").returncode == 1


def test_a_stream_that_is_lost_is_called_again() -> None:
    with Stage([STORY, [*STORY[:1], mark(9.0, "lost", "the end")]]).playing() as stage:
        watching = start("--url", stage.url, "--key-env", "KEY", stdout=subprocess.PIPE)
        assert watching.stdout is not None
        texts = []
        for line in watching.stdout:
            texts.append(line[9:].strip())
            if "the end" in line:
                break
        watching.send_signal(signal.SIGINT)
        assert watching.wait(HANG_S) == 0
        watching.stdout.close()
    assert stage.calls == [f"Bearer {KEY}"] * 2
    assert [text.partition(":")[0] for text in texts if ":" in text] == [
        *("epoch", "away", "gap", "lost")
    ]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_ends_it_and_is_told(status: int) -> None:
    with Stage([[]], status=status).playing() as stage:
        done = run("--url", stage.url)
    assert (done.returncode, done.stderr) == (1, "error: show a key\n")
    assert len(stage.calls) == 1


def test_a_terminal_shows_lanes_until_ctrl_c(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "run.jsonl")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    showing = start("--file", str(path), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + HANG_S
    while "▞".encode() not in shown or b"cmpl-0003" not in shown:
        assert time.monotonic() < deadline
        shown += os.read(ours, 65536)
    showing.send_signal(signal.SIGINT)
    while showing.poll() is None:
        assert time.monotonic() < deadline
        try:
            os.read(ours, 65536)
        except OSError:  # it has closed the terminal
            break
    assert showing.wait(HANG_S) == 0
    os.close(ours)
