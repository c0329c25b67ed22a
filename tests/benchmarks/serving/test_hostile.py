"""The record of attacks has what is printed, and names the attacks that had success."""

import json
from pathlib import Path
from typing import Any

from benchmarks.serving.hostile import entry, write


def result(attack: str) -> dict[str, Any]:
    """Returns what is measured of an attack that doubles the gaps of honest streams."""
    witness = {"stall_s": 0.01, "stall_p99_s": 0.0012345, "gap_p99_s": 0.03, "n_complete": 9}
    return {
        "attack": attack,
        "took_s": 5.04,
        "answers": {"431": 3},
        "honest": {**witness, "gap_p99_s": 0.06},
        "undisturbed": {**witness, "gap_p99_s": 0.02},
        "beside": witness,
        "peak_bytes": {"frontend": 2**27, "scheduler": 2**26},
        "refusals": {"head too large": 3},
        "faults": [],
        "ratio_to_undisturbed": 3.0,
        "ratio": 2.0,
    }


def test_an_entry_has_the_figures_of_a_row() -> None:
    found = entry(result("many_headers"))
    assert found["gap_p99_s"] == {"undisturbed": 0.02, "beside": 0.03, "attacked": 0.06}
    assert (found["ratio"], found["ratio_to_undisturbed"]) == (2.0, 3.0)
    assert (found["peak_bytes"], found["stall_p99_s"]) == (2**27, 0.0012)
    assert (found["answers"], found["refusals"]) == ({"431": 3}, {"head too large": 3})


def test_a_record_is_json_in_which_each_attack_has_a_line(tmp_path: Path) -> None:
    path, about = tmp_path / "hostile.json", {"commit": "abc", "lost": ["slow_bodies"]}
    entries = [entry(result(name)) for name in ("many_headers", "slow_bodies")]
    write(path, about, entries)
    text = path.read_text()
    assert json.loads(text) == {**about, "attacks": entries}
    assert sum(line.startswith('{"attack"') for line in text.splitlines()) == 2
