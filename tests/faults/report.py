"""The findings of a run, as a table for people and as JSON."""

import bisect
import itertools
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tests.faults.checker import Event, StreamId, Tokens, Violation
from tests.faults.nemesis import PHASES, UNDER_WAY_S, Injected

SEVERAL = "several within one pause"


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a run was about."""

    seed: int
    injected: Sequence[Injected]
    events: Sequence[Event]
    violations: Sequence[Violation]
    leftovers: Mapping[str, float]
    epochs: Sequence[int]
    n_recovered: int
    """Faults after which everything went on."""
    n_restarts: int
    n_resumed: int
    n_requests: int
    took_s: float

    @property
    def n_streams(self) -> int:
        return len({event.stream for event in self.events})


def pauses_of(events: Iterable[Event], injected: Sequence[Injected]) -> dict[str, list[float]]:
    """Returns the pauses that faults have drawn out, the shortest first, by role and kind of the
    fault: for each fault and each stream, the longest time between two tokens of the stream."""
    times: dict[StreamId, list[float]] = defaultdict(list)
    for event in events:
        if isinstance(event, Tokens):
            times[event.stream].append(event.time_s)
    at = [item.time_s for item in injected]
    longest: dict[tuple[str, int, StreamId], float] = defaultdict(float)
    for stream, stream_times in times.items():
        for before, after in itertools.pairwise(stream_times):
            first, last = bisect.bisect(at, before - UNDER_WAY_S), bisect.bisect(at, after)
            if first < last:
                name = name_of(injected[first]) if last - first == 1 else SEVERAL
                key = (name, first, stream)
                longest[key] = max(longest[key], after - before)
    pauses: dict[str, list[float]] = defaultdict(list)
    for (name, _, _), pause_s in sorted(longest.items(), key=itemgetter(1)):
        pauses[name].append(pause_s)
    return dict(pauses)


def p99(pauses: Sequence[float]) -> float | None:
    """Returns the 99th percentile of sorted pauses in seconds; None without any."""
    return round(pauses[math.ceil(0.99 * len(pauses)) - 1], 2) if pauses else None


def name_of(injected: Injected) -> str:
    """Returns role and kind of a fault."""
    return f"{injected.fault.role}: {injected.fault.kind}"


def summary(run: Run) -> dict[str, Any]:
    """Returns the report, for JSON."""
    pauses = pauses_of(run.events, run.injected)
    faults: dict[str, Any] = {}
    for name in sorted({name_of(item) for item in run.injected}):
        items = [item for item in run.injected if name_of(item) == name]
        phases = Counter(item.fault.phase for item in items)
        faults[name] = {
            "n": len(items),
            "phases": {phase: phases[phase] for phase in PHASES},
            "n_pauses": len(pauses.get(name, ())),
            "p99_pause_s": p99(pauses.get(name, ())),
            "longest_pause_s": round(pauses[name][-1], 2) if name in pauses else None,
        }
    return {
        "seed": run.seed,
        "faults": faults,
        "n_faults": len(run.injected),
        "n_recovered": run.n_recovered,
        "n_faults_out_of_phase": sum(not item.in_phase for item in run.injected),
        "longest_pause_of_several_s": round(max(pauses.get(SEVERAL, (0.0,))), 2),
        "load": [round(load, 1) for load in os.getloadavg()],
        "n_requests": run.n_requests,
        "n_streams": run.n_streams,
        "n_tokens": sum(len(event.token_ids) for event in run.events if isinstance(event, Tokens)),
        "n_resumed": run.n_resumed,
        "n_restarts": run.n_restarts,
        "violations": dict(
            Counter(kind for _, kind in {(item.stream, item.kind) for item in run.violations})
        ),
        "leftovers": dict(run.leftovers),
        "first_epoch": run.epochs[0] if run.epochs else None,
        "last_epoch": run.epochs[-1] if run.epochs else None,
        "took_s": round(run.took_s, 1),
    }


def table(report: Mapping[str, Any]) -> str:
    """Returns the report as text."""
    head = (
        f"{'fault':<24}{'n':>5}"
        + "".join(f"{phase:>17}" for phase in PHASES)
        + f"{'pause, p99':>13}{'longest':>10}"
    )
    lines = [head]
    for name, row in report["faults"].items():
        counts = "".join(f"{row['phases'][phase]:>17}" for phase in PHASES)
        p99_s, longest_s = (
            "-" if pause is None else f"{pause:.1f} s"
            for pause in (row["p99_pause_s"], row["longest_pause_s"])
        )
        lines.append(f"{name:<24}{row['n']:>5}{counts}{p99_s:>13}{longest_s:>10}")
    wrong = report["violations"]
    lines += [
        f"{SEVERAL}: {report['longest_pause_of_several_s']:.1f} s",
        f"{report['n_faults']} faults, {report['n_restarts']} restarts, epochs "
        f"{report['first_epoch']} to {report['last_epoch']}, in {report['took_s']:.0f} s; load of "
        f"the machine {report['load'][-1]:g}",
        f"{report['n_streams']} streams of {report['n_requests']} requests, "
        f"{report['n_tokens']} tokens, {report['n_resumed']} resumed by their clients",
        f"{wrong.get('lost', 0)} lost, {wrong.get('changed', 0)} changed, "
        f"others: { {kind: n for kind, n in wrong.items() if kind not in ('lost', 'changed')} }",
        f"left over: {report['leftovers']}",
    ]
    return "\n".join(lines)


def write(report: Mapping[str, Any], path: Path) -> None:
    """Writes the report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
