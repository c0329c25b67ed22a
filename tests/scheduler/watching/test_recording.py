"""Recordings: what is in the file, how long it gets, and a disk that is full."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from orcinus.v1 import watch_pb2

from services.common.watch_json import HEADER
from services.scheduler.replay import DIFFERENT, SAME, UNUSABLE, main
from services.scheduler.watching.recording import Recording, RecordingFull, recorded
from tests.limits import HANG_S
from tests.scheduler.watching.play import Play


def objects(path: Path) -> list[dict[str, Any]]:
    """The lines of a recording."""
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_recording_has_all_that_was_told_and_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play, path = Play(), tmp_path / "run.jsonl"
    async with recorded(play.watching, path):
        play.open()
        play.submit("a", max_new_tokens=6)
        play.run(2)
        play.send()
        play.lose()
        play.open()
        play.run(2)
    lines = objects(path)
    assert lines[0] == HEADER
    assert lines[-1] == {"type": "end", "text": "the scheduler stopped"}
    types = {line["type"] for line in lines}
    assert types >= {"recording", "epoch", "request", "iteration", "mark", "decision", "end"}
    assert main([str(path)]) == SAME
    assert "5 batches, all the same" in capsys.readouterr().out


async def test_replay_says_what_differs_and_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play, path = Play(), tmp_path / "run.jsonl"
    async with recorded(play.watching, path):
        play.open()
        play.submit("a")
        play.run(4)
    path.write_text(
        path.read_text().replace('"max_new_tokens":4,"stop', '"max_new_tokens":3,"stop')
    )
    assert main([str(tmp_path / "none")]) == UNUSABLE
    assert "No such file" in capsys.readouterr().err
    changed = tmp_path / "changed.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines = [line for line in lines if '"result"' not in line]
    changed.write_text("".join(lines))
    assert main([str(changed)]) == DIFFERENT
    assert "line " in capsys.readouterr().err


async def test_a_recording_ends_at_its_limit_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play, path = Play(), tmp_path / "run.jsonl"
    async with recorded(play.watching, path, max_bytes=4000):
        play.open()
        play.submit("a", max_new_tokens=50, speculation=None)
        play.run(30)
        async with asyncio.timeout(HANG_S):
            while play.watching.is_watched:
                play.watching.drain()
                await asyncio.sleep(0.01)
        play.run(3)
    assert path.stat().st_size <= 4000
    assert objects(path)[-1]["text"] == "the recording has its limit of 4000 bytes"
    assert "limit of 4000 bytes" in caplog.text
    assert main([str(path)]) == SAME


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is full")
async def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play, path = Play(), tmp_path / "run.jsonl"
    path.symlink_to("/dev/full")
    async with recorded(play.watching, path):
        play.open()
        async with asyncio.timeout(HANG_S):
            while play.watching.is_watched:
                play.watching.drain()
                await asyncio.sleep(0.01)
        play.submit("a")
        play.run(3)
    assert "No space left" in caplog.text


async def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        async with recorded(Play().watching, tmp_path / "none" / "run.jsonl"):
            pass


async def test_the_recording_of_the_scheduler_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for text in ("first", "second"):
        Recording(path).end(text)
    assert objects(path)[-1]["text"] == "second"
    assert objects(tmp_path / "run.jsonl.1")[-1]["text"] == "first"


async def test_nobody_writes_beyond_the_limit(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "run.jsonl", max_bytes=600)
    event = watch_pb2.WatchEvent(mark=watch_pb2.MarkEvent(text="x" * 600))
    with pytest.raises(RecordingFull):
        recording.write(watch_pb2.WatchResponse(events=[event]))
