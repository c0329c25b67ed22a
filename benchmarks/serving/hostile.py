"""Attacks on a running system, and their effects on the system and on honest streams.

    python -m benchmarks.serving.hostile                            all attacks
    python -m benchmarks.serving.hostile --attacks many_headers     some

The demo model is served with the settings of production; the attacks are defined in
`tests/hostile`. The engine has a processor of its own, as its pod has.

Sixteen honest streams run in three phases around each attack, one right after the other, so that
the results can be compared: undisturbed (`gap`, the 99th percentile of the time between tokens),
while the attacker attacks a second frontend of the same system (`beside`), and while the attacker
attacks the frontend of the honest streams (`attacked`). All processes but the engine share the
other processors, including the attacker and the kernel's work for the attacker, and any full batch
slows down the engine. `beside` includes all these costs. An attacker on the internet uses no
processor of the machine. So `own` = attacked / beside is the effect of an attack on the attacked
frontend, and must stay below 2. `all` = attacked / gap includes the effect of sharing the machine,
which `own` leaves out.

`stall` is the longest time of `GET /health` on a connection that was open before the attack, and
`p99` is the 99th percentile of these times. The times for which the frontend and the client waited
for a processor are subtracted, so that both numbers measure how long the event loop was blocked.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.pinning import ranks_apart
from tests.hostile import pods as hostile_pods
from tests.hostile.attack import Attack
from tests.hostile.attacks import ATTACKS
from tests.hostile.helper import Helper, NoAnswer
from tests.hostile.pods import PodLost, Pods
from tests.hostile.settings import systems
from tests.hostile.target import Target

COLUMNS = (
    f"{'attack':<28} {'s':>5} {'MiB':>5} {'stall ms':>8} {'p99':>6} {'gap ms':>7} {'beside':>7} "
    f"{'attacked':>8} {'all':>5} {'own':>5}  answers, refusals, and what is wrong"
)
MAX_RATIO = 2.0
"""Largest allowed slowdown of honest clients. The slowdown is the 99th percentile of the gaps
between their tokens while their own frontend is attacked, divided by the same percentile while
another frontend of the same scheduler is attacked."""
MAX_STALL_S = 0.25
UNDISTURBED_S = 4.0
ATTACK_S = 5.0
"""Seconds for which short attacks are repeated, so that enough gaps are measured."""
MIB = 2**20


def row(result: Mapping[str, Any]) -> str:
    """Returns a result as a line of the table, with the columns of `COLUMNS`."""
    honest = result["honest"]
    return (
        f"{result['attack']:<28} {result['took_s']:>5.1f} "
        f"{result['peak_bytes']['frontend'] / MIB:>5.0f} {1e3 * honest['stall_s']:>8.0f} "
        f"{1e3 * honest['stall_p99_s']:>6.1f} {1e3 * result['undisturbed']['gap_p99_s']:>7.1f} "
        f"{1e3 * result['beside']['gap_p99_s']:>7.1f} {1e3 * honest['gap_p99_s']:>8.1f} "
        f"{result['ratio_to_undisturbed']:>5.2f} {result['ratio']:>5.2f}  "
        f"{result['answers']} {result['refusals']} {'; '.join(result['faults'])}"
    )


def entry(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a result as a dictionary for the JSON record: the same values as in `row`, in seconds
    and bytes."""
    honest = result["honest"]
    return {
        "attack": result["attack"],
        "took_s": round(result["took_s"], 1),
        "peak_bytes": result["peak_bytes"]["frontend"],
        "stall_s": round(honest["stall_s"], 4),
        "stall_p99_s": round(honest["stall_p99_s"], 4),
        "gap_p99_s": {
            "undisturbed": round(result["undisturbed"]["gap_p99_s"], 4),
            "beside": round(result["beside"]["gap_p99_s"], 4),
            "attacked": round(honest["gap_p99_s"], 4),
        },
        "ratio_to_undisturbed": round(result["ratio_to_undisturbed"], 2),
        "ratio": round(result["ratio"], 2),
        "answers": result["answers"],
        "refusals": result["refusals"],
        "faults": result["faults"],
    }


def write(path: Path, about: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    """Writes a record as JSON, with one line for each attack."""
    lines = [f'"{key}": {json.dumps(value)},\n' for key, value in about.items()]
    attacks = ",\n".join(map(json.dumps, entries))
    path.write_text("{\n" + "".join(lines) + f'"attacks": [\n{attacks}\n]\n}}\n')


@contextlib.contextmanager
def neighbour_of(pods: Pods) -> Iterator[Target]:
    """Runs a second frontend of a system inside the context, with the options of the first
    frontend."""
    read_fd, write_fd = os.pipe()
    command = [
        f"--ready-fd={write_fd}" if argument.startswith("--ready-fd=") else argument
        for argument in pods.processes["frontend"].cmdline()
    ]
    with open(read_fd) as lines, subprocess.Popen(command, pass_fds=[write_fd]) as process:
        os.close(write_fd)
        try:
            said: dict[str, str] = {}
            while "http" not in said:
                said = json.loads(lines.readline())
            yield dataclasses.replace(
                pods.target, http=said["http"], grpc=said["grpc"], frontend_pid=process.pid
            )
        finally:
            process.kill()


def attack_system(
    attacks: Sequence[Attack], system: Mapping[str, Any], results: list[dict[str, Any]]
) -> list[str]:
    """Runs attacks on a system, and starts a new system after each attack that breaks the system.
    Prints the results and adds them to `results`. Returns the names of the attacks that
    succeeded."""
    lost: list[str] = []
    left = list(attacks)
    while left:
        with (
            hostile_pods.running(threads=1, **system) as pods,
            hostile_pods.witness_of(pods, measures=True) as witness,
            neighbour_of(pods) as neighbour,
            ranks_apart(),
        ):
            while left:
                attack = left.pop(0)
                try:
                    result = measure(pods, attack, witness, neighbour)
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


def measure(pods: Pods, attack: Attack, witness: Helper, neighbour: Target) -> dict[str, Any]:
    """Measures the honest streams in three phases: undisturbed, during an attack on another
    frontend, and during the same attack on their own frontend. Prints and returns the result."""
    undisturbed = pods.undisturbed(witness, for_s=UNDISTURBED_S)
    with hostile_pods.attacker_of(neighbour) as attacker:
        beside = pods.beside(attack, attacker, witness, for_s=ATTACK_S)
    with hostile_pods.attacker_of(pods.target) as attacker:
        outcome = pods.suffer(attack, attacker, witness, for_s=ATTACK_S)
    attacked_s = outcome.honest["gap_p99_s"]
    result = {
        "undisturbed": undisturbed,
        "beside": beside,
        **dataclasses.asdict(outcome),
        "ratio_to_undisturbed": attacked_s / undisturbed["gap_p99_s"],
        "ratio": attacked_s / beside["gap_p99_s"],
    }
    print(row(result), flush=True)
    return result


def run(options: argparse.Namespace) -> int:
    """Runs the attacks that the options name. The exit status is 1 if an attack succeeded."""
    names = options.attacks or list(ATTACKS)
    attacks = [ATTACKS[name] for name in names]
    about = machine.describe()
    results: list[dict[str, Any]] = []
    lost: list[str] = []
    print(COLUMNS, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name, system in systems(Path(directory)).items():
            chosen = [attack for attack in attacks if attack.system == name]
            lost += attack_system(chosen, system, results)
    if options.out is not None:
        about["lost"] = lost
        write(options.out, about, [entry(result) for result in results])
    print(f"{len(lost)} of {len(attacks)} had success: {', '.join(lost)}" if lost else "all held")
    return int(bool(lost))


def main() -> int:
    """Parses the command line and runs the attacks. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, metavar="NAME")
    parser.add_argument("--out", type=Path, help="file for a record, JSON")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
