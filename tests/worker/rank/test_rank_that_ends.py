"""What a rank that cannot start, or has a bug, leaves behind."""

import json
import socket
import subprocess
import sys

import pytest

from services.worker.channel import MessageKind, RankEnd
from services.worker.settings import PipelinePlace
from tests.limits import HANG_S

pytestmark = pytest.mark.system

PROGRAM = """
from services.common.cannot_start import CannotStart
from services.worker.rank.__main__ import main

def make_rank(settings, channel, activity):
    raise {error}("why")

main(make_rank, traits=lambda settings: {{}})
"""
SETTINGS = {
    "model": "m",
    "tp_rank": 1,
    "kv_memory_bytes": None,
    "log_level": "WARNING",
}


@pytest.mark.parametrize(
    ("error", "kind", "reason", "has_traceback"),
    [
        pytest.param("CannotStart", MessageKind.REFUSAL, "why", False, id="setting"),
        pytest.param(
            "KeyError",
            MessageKind.FAILURE,
            "KeyError: 'why'",
            True,
            id="bug",
        ),
    ],
)
@pytest.mark.thorough
def test_only_a_bug_leaves_a_traceback(
    error: str, kind: MessageKind, reason: str, has_traceback: bool
) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    theirs = [their_end for _, their_end in pairs]
    command = [sys.executable, "-c", PROGRAM.format(error=error)]
    command += [*(str(end.fileno()) for end in theirs), json.dumps(SETTINGS)]
    process = subprocess.Popen(
        command, pass_fds=[end.fileno() for end in theirs], stderr=subprocess.PIPE, text=True
    )
    for end in theirs:
        end.close()
    try:
        channel = RankEnd(pairs[0][0])
        assert channel.receive(60) == (MessageKind.TRAITS, b"")
        channel.send(MessageKind.PLACE, PipelinePlace(0, 1).to_bytes())
        assert channel.receive(60) == (kind, reason.encode())
        _, said = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.communicate()
        for ours, _ in pairs:
            ours.close()
    assert process.returncode == 1
    assert ("Traceback" in said) is has_traceback
    assert has_traceback or not said
