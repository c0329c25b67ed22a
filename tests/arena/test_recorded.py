"""A recording under another policy: its requests, its machine, and what was really reached."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.arena import recorded
from services.arena.__main__ import main
from services.arena.virtual import run
from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from services.scheduler.settings import SchedulerSettings
from services.scheduler.watching.watcher import Watcher
from tests.scheduler.watching.play import Play
from tests.scheduler.watching.test_replaying import lines_of

PAGES = Path(__file__).parents[2] / "services" / "frontend" / "page" / "recordings"


def recording(path: Path, *, n_answers: int = 6, n_vectors: int = 0, **settings: Any) -> Path:
    """Writes a recording of a few requests of two clients, half of which have equal prompts, and of
    requests for vectors."""

    async def play() -> Watcher:
        pipeline = Play(SchedulerSettings(n_stages=1, max_batch_size=3, **settings))
        accounts = [AccountUse(AccountLimits(weight=w), name=f"key {w:g}") for w in (1.0, 3.0)]
        with pipeline.watching.watch(has_decisions=True) as watcher:
            pipeline.open()
            for index in range(n_answers):
                pipeline.submit(
                    str(index),
                    prompt=[7] * 40 if index % 2 else [index] * 40,
                    max_new_tokens=3 + index,
                    account=accounts[index % 2],
                )
                pipeline.run()
            for index in range(n_vectors):
                pipeline.submit(f"vector {index}", prompt=[index] * 20, max_new_tokens=0)
                pipeline.run()
            while pipeline.pool.n_running or pipeline.pool.n_waiting:
                pipeline.run()
        return watcher

    path.write_bytes(b"".join(lines_of(asyncio.run(play()))))
    return path


def test_requests_machine_and_settings_come_from_the_recording(tmp_path: Path) -> None:
    found = recorded.read(recording(tmp_path / "a.jsonl", admission="optimistic"))
    arrivals = found.traffic.arrivals
    assert [one.n_prompt for one in arrivals] == [40] * 6
    assert [one.n_output for one in arrivals] == [3, 4, 5, 6, 7, 8]
    accounts = [one.account for one in arrivals if one.account is not None]
    assert [one.limits.weight for one in accounts] == [1.0, 3.0] * 3
    setup = found.setup
    assert (setup.max_batch_size, setup.is_optimistic, setup.has_prefix_cache) == (3, True, True)
    assert found.entrant.name == "fair"
    assert found.figures.n_requests == 6
    assert found.figures.jain is not None
    prompts = [one.prompt_token_ids for one in arrivals]
    assert prompts[1] == prompts[3] == prompts[5]
    assert prompts[0] != prompts[2]
    for policy in (found.entrant, type(found.entrant)("orca", "fcfs")):
        assert run(policy, setup, arrivals).n_requests == 6


def test_requests_for_vectors_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path / "a.jsonl", n_vectors=3)
    found = recorded.read(path)
    assert (found.n_vectors, found.figures.n_requests, len(found.traffic.arrivals)) == (3, 6, 6)
    assert main(["fair", "--recording", str(path), "--json"]) == 0
    assert "left out: 3 requests for vectors" in capsys.readouterr().err
    path = recording(tmp_path / "b.jsonl", n_answers=0, n_vectors=2)
    with pytest.raises(ValueError, match="all its requests are for vectors"):
        recorded.read(path)


def test_a_recording_is_compared_with_other_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path / "a.jsonl")
    assert main(["orca", "fair", "--recording", str(path), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["policy"], one["way"]) for one in found] == [
        ("fair", "recorded"),
        ("fair", "virtual"),
        ("orca", "virtual"),
    ]
    assert {one["n_requests"] for one in found} == {6}


@pytest.mark.parametrize("name", ["chunked", "orca"])
def test_virtual_time_comes_close_to_what_a_machine_has_done(name: str) -> None:
    """The recordings of the page are of a real system on two stages."""
    found = recorded.read(PAGES / f"{name}.jsonl")
    again = run(found.entrant, found.setup, found.traffic.arrivals)
    assert again.tokens_per_s == pytest.approx(found.figures.tokens_per_s, rel=0.1)
    assert again.gap_p50_s == pytest.approx(found.figures.gap_p50_s, rel=0.2)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["{}"], "is no event"),
        (['{"type": "recording", "version": 1}'], "of version 1"),
        (['{"type": "recording", "version": 2}'], "no request of it got a token"),
        (['{"type": "recording", "version": 2}', '{"type": "request"}\n'], "KeyError"),
    ],
)
def test_what_is_no_recording_is_refused(lines: list[str], why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=why):
        recorded.read(path)


def test_a_policy_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text((PAGES / "orca.jsonl").read_text().replace('"orca"', '"unheard-of"'))
    with pytest.raises(ValueError, match="there is no policy 'unheard-of'"):
        recorded.read(path)
