"""Attacks on a running system, and what they do to it and to the honest streams beside them.

    python -m benchmarks.hostile                            all attacks
    python -m benchmarks.hostile --attacks many_headers     some

The demo model is served with the settings of production; the attacks are those of `tests/hostile`.
Sixteen honest streams run undisturbed before each attack and begin again beside it, so that both
figures of a ratio are of one minute. The engine has a processor of its own, as its pod has, and
attackers run at the lowest priority, as theirs would be another machine. `stall` is the longest
wait of `GET /health` on a connection that was there before, less the time that processes waited
for a processor.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.pinning import pin_ranks
from tests.hostile import pods as hostile_pods
from tests.hostile.attack import Attack
from tests.hostile.attacks import ATTACKS
from tests.hostile.helper import Helper, NoAnswer
from tests.hostile.pods import Outcome, PodLost, Pods
from tests.hostile.settings import systems

COLUMNS = (
    f"{'attack':<28} {'s':>5} {'MiB':>5} {'stall ms':>8} {'gap ms':>7} {'attacked':>8} "
    f"{'ratio':>5}  answers, refusals, and what is wrong"
)
MAX_RATIO = 2.0
"""Most that the 99th percentile of honest gaps may grow."""
MAX_STALL_S = 0.25
UNDISTURBED_S = 4.0
ATTACK_S = 5.0
"""Seconds for which attacks that are shorter begin again, so that there are gaps enough."""
MIB = 2**20


def row(outcome: Outcome, undisturbed_s: float) -> str:
    """Returns an outcome's line under `COLUMNS`."""
    honest = outcome.honest
    return (
        f"{outcome.attack:<28} {outcome.took_s:>5.1f} {outcome.peak_bytes['frontend'] / MIB:>5.0f} "
        f"{1e3 * honest['stall_s']:>8.0f} {1e3 * undisturbed_s:>7.1f} "
        f"{1e3 * honest['gap_p99_s']:>8.1f} {honest['gap_p99_s'] / undisturbed_s:>5.2f}  "
        f"{outcome.answers} {outcome.refusals} {'; '.join(outcome.faults)}"
    )


def attack_system(
    attacks: Sequence[Attack], system: Mapping[str, Any], results: list[dict[str, Any]]
) -> list[str]:
    """Attacks a system, and another one when that is lost; prints what comes of it, and returns the
    attacks that had success."""
    lost: list[str] = []
    left = list(attacks)
    while left:
        with (
            hostile_pods.running(threads=1, **system) as pods,
            hostile_pods.witness_of(pods) as witness,
        ):
            pin_ranks(psutil.Process())
            while left:
                attack = left.pop(0)
                try:
                    result = measure(pods, attack, witness)
                except (PodLost, NoAnswer) as error:
                    print(f"{attack.name:<28} {error}", flush=True)
                    lost.append(attack.name)
                    break
                results.append(result)
                if result["faults"] or result["ratio"] > MAX_RATIO:
                    lost.append(attack.name)
                if result["faults"]:
                    break  # the next one begins with a system that is well
    return lost


def measure(pods: Pods, attack: Attack, witness: Helper) -> dict[str, Any]:
    """Measures one attack, and prints it."""
    with hostile_pods.attacker_of(pods) as attacker:
        undisturbed = pods.undisturbed(witness, for_s=UNDISTURBED_S)
        outcome = pods.suffer(attack, attacker, witness, for_s=ATTACK_S)
    print(row(outcome, undisturbed["gap_p99_s"]), flush=True)
    ratio = outcome.honest["gap_p99_s"] / undisturbed["gap_p99_s"]
    return {"undisturbed": undisturbed, **dataclasses.asdict(outcome), "ratio": ratio}


def run(options: argparse.Namespace) -> int:
    """Runs the attacks that the options name; the exit status says whether all were held off."""
    names = options.attacks or list(ATTACKS)
    attacks = [ATTACKS[name] for name in names]
    results: list[dict[str, Any]] = []
    lost: list[str] = []
    print(COLUMNS, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, system in systems(Path(directory)).items():
            chosen = [attack for attack in attacks if attack.system == name]
            lost += attack_system(chosen, system, results)
    if options.out is not None:
        options.out.write_text(json.dumps({**machine.describe(), "attacks": results}, indent=1))
    print(f"{len(lost)} of {len(attacks)} had success: {', '.join(lost)}" if lost else "all held")
    return int(bool(lost))


def main() -> int:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, metavar="NAME")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
