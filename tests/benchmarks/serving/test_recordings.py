"""What of a recording is shown, and that it is the same run in all of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.recordings import MAX_BYTES, OUT, VARIANTS, VISITS, shown, write
from services.common.watch_json import HEADER


def life(number: int, index: int) -> list[dict[str, Any]]:
    """The events of one visit."""
    visit = VISITS[index]
    whole = {"n_prompt_tokens": visit.n_prompt, "max_new_tokens": visit.n_output}
    iteration = {"type": "iteration", "numbers": [number], "n_new_tokens": [visit.n_output]}
    return [
        {"t": 5.0 + index, "type": "request", "number": number, "turn": "waiting", **whole},
        {"t": 5.0 + index, "type": "decision", "submission": {}},
        {"t": 6.0 + index, "type": "pool", "waiting": [], "running": [number]},
        {"t": 7.0 + index, **iteration},
        {"t": 8.0 + index, "type": "request", "number": number, "turn": "ended"},
    ]


def recording() -> list[dict[str, Any]]:
    """A recording in which the last visit came first, after a request of no visit."""
    first = [
        {"t": 1.0, "type": "request", "number": 1, "turn": "waiting", "n_prompt_tokens": 5},
        {"t": 2.0, "type": "request", "number": 1, "turn": "ended"},
    ]
    last = len(VISITS) - 1
    order = [last, *range(last)]
    lives = [event for place, index in enumerate(order) for event in life(place + 2, index)]
    epoch = {"t": 0.5, "type": "epoch", "epoch": 1}
    return [dict(HEADER), {"t": 0.4, "type": "decision", "core": "{}"}, epoch, *first, *lives]


def test_what_is_shown_begins_with_the_first_visit_and_has_no_decisions() -> None:
    header, epoch, request, pool, *_ = shown(recording())
    assert header == HEADER
    assert (epoch["type"], epoch["t"]) == ("epoch", request["t"])
    assert (request["number"], pool["running"]) == (len(VISITS), [len(VISITS)])
    assert all(line["type"] != "decision" for line in shown(recording()))


def test_a_recording_in_which_somebody_did_not_end_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in recording()[:-1]))
    with pytest.raises(ValueError, match=f"{len(VISITS) - 1} requests ended"):
        write(path, tmp_path / "shown.jsonl")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_recordings_in_the_repository_have_all_visits(name: str) -> None:
    path = OUT / f"{name}.jsonl"
    assert path.stat().st_size <= MAX_BYTES
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["type"] == "recording"
    assert [line["policy"] for line in lines if line["type"] == "epoch"] == [name]
    iterations = [line for line in lines if line["type"] == "iteration"]
    assert sum(sum(line["n_new_tokens"]) for line in iterations) <= sum(v.n_output for v in VISITS)
    assert {number for line in iterations for number in line["numbers"]} == set(
        range(1, len(VISITS) + 1)
    )
    assert all(len(line["stages"]) == 2 for line in iterations)
    assert lines[-1]["type"] == "end"
