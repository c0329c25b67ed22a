"""The system with the settings and the limits of its pods, and what it says of itself.

The kernel counts the peak of a process's resident memory, and starts again when it is told to; that
must stay below the limit of its pod. `RLIMIT_DATA` is a net beneath it, for the machine's sake: it
counts the stacks of threads, which are reserved and not resident, and so lies higher.
"""

import contextlib
import dataclasses
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.hostile import tree
from tests.hostile.attack import Attack
from tests.hostile.helper import Helper, NoAnswer
from tests.hostile.rest import leftovers
from tests.hostile.target import Target
from tests.system.stack import ROOT, Stack, serving

MODEL = ROOT / "models" / "demo"
MODULES = {"frontend": "services.frontend", "scheduler": "services.scheduler"}
MAX_SHARE = 0.8
"""Part of its pod's limit that a process may have in memory."""
NET = 4
"""Largest data segment of a process, as a multiple of its pod's memory limit, beyond the size at
the start."""
REST_LIMIT_S = 20.0
"""Seconds in which nothing may be left of an attack that is over."""
WITNESS_LIMIT_S = 90.0
LAST_WORDS_S = 2.0
"""Seconds that a system which has lost a process takes to say so."""
NICENESS = 10
"""Niceness of attackers: a tenth of the processor time of others where all want it. They must not
starve either, or they would not attack."""
MIB = 2**20
REST_SHARE = 0.5
"""Part of its pod's memory limit that a process may still use after an attack. Memory that the
allocator keeps must not accumulate over several attacks."""
SERVER_ERRORS = {"500", "502", "INTERNAL", "UNKNOWN"}


class PodLost(Exception):
    """Raised when a process that is attacked has ended."""


def pod_limit_bytes(component: str) -> int:
    """Returns the limit of memory of a component's pod, by its manifest."""
    for document in yaml.safe_load_all((ROOT / f"k8s/base/{component}.yaml").read_text()):
        if document["kind"] == "Deployment":
            [container] = document["spec"]["template"]["spec"]["containers"]
            found = re.fullmatch(r"(\d+)Mi", container["resources"]["limits"]["memory"])
            assert found is not None
            return int(found[1]) * MIB
    raise AssertionError(f"{component} has no Deployment")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attack did to the system, and to the honest streams beside it."""

    attack: str
    took_s: float
    answers: dict[str, int]
    """Number of answers that the attacker got, by kind."""
    honest: dict[str, Any]
    """The report of the witness."""
    peak_bytes: dict[str, int]
    """Most resident memory of each component during the attack."""
    rss_before: int
    rss_after: int
    """Resident memory of the frontend, when everything was at rest."""
    refusals: dict[str, int]
    """Clients that were refused, by reason."""
    faults: list[str]
    """Descriptions of all violations of the test's conditions."""


class Pods:
    """A running system, an attacker and a witness."""

    def __init__(
        self, stack: Stack, *, api_key: str | None = None, honest_key: str | None = None
    ) -> None:
        self.stack = stack
        self.limits = {component: pod_limit_bytes(component) for component in MODULES}
        self.processes = {
            component: psutil.Process(stack.pids(module)[0])
            for component, module in MODULES.items()
        }
        self.target = Target(
            http=stack.http.removeprefix("http://"),
            grpc=stack.grpc,
            scheduler=stack.scheduler_address(),
            worker=stack.stage_addresses()[0],
            frontend_pid=self.processes["frontend"].pid,
            api_key=api_key,
        )
        """The system as an attacker sees it."""
        self.honest_target = dataclasses.replace(self.target, api_key=honest_key)
        for component, process in self.processes.items():
            data_bytes = _status_bytes(process.pid, "VmData") + NET * self.limits[component]
            process.rlimit(psutil.RLIMIT_DATA, (data_bytes, data_bytes))

    def suffer(
        self, attack: Attack, attacker: Helper, witness: Helper, *, for_s: float = 0.0
    ) -> Outcome:
        """Attacks beside honest streams, once or over and over, and waits until everything is at
        rest.

        Raises:
            PodLost: a process has ended.
        """
        before, rss_before = self.refusals(), self.rss("frontend")
        for process in self.processes.values():
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        answers, faults = dict[str, int](), list[str]()
        witness.ask("begin", limit_s=5)
        start_s = time.monotonic()
        try:
            answers = attacker.ask((attack.name, for_s), limit_s=for_s + attack.limit_s)
        except NoAnswer as error:
            faults.append(f"the attacker: {error}")
        took_s = time.monotonic() - start_s
        honest = witness.ask("end", limit_s=WITNESS_LIMIT_S)
        try:
            left = self.settled_leftovers()
            refusals = Counter(self.refusals())
            peak_bytes = {name: _status_bytes(p.pid, "VmHWM") for name, p in self.processes.items()}
            rss_after = self.rss("frontend")
        except (httpx.TransportError, OSError, psutil.Error) as error:
            time.sleep(LAST_WORDS_S)
            last_words = "".join(self.stack.output[-5:])
            raise PodLost(f"lost after {took_s:.1f} s: {last_words}") from error
        refusals.subtract(before)
        faults += [f"{count:g} left of {name}" for name, count in left.items()]
        faults += self._faults_of_memory(peak_bytes, rss_after)
        faults += _faults_of_answers(attack, answers, refusals)
        faults += _faults_of_honest(attack, honest)
        return Outcome(
            attack=attack.name,
            took_s=took_s,
            answers=answers,
            honest=honest,
            peak_bytes=peak_bytes,
            rss_before=rss_before,
            rss_after=rss_after,
            refusals={reason: n for reason, n in refusals.items() if n},
            faults=faults,
        )

    def _faults_of_memory(self, peak_bytes: Mapping[str, int], rss_after: int) -> list[str]:
        faults = [
            f"the {component} took {peak / MIB:.0f} MiB"
            for component, peak in peak_bytes.items()
            if peak > MAX_SHARE * self.limits[component]
        ]
        if rss_after > REST_SHARE * self.limits["frontend"]:
            faults.append(f"the frontend kept {rss_after / MIB:.0f} MiB")
        return faults

    def undisturbed(self, witness: Helper, *, for_s: float) -> dict[str, Any]:
        """Returns the figures of the honest streams without an attack."""
        witness.ask("begin", limit_s=5)
        time.sleep(for_s)
        report: dict[str, Any] = witness.ask("end", limit_s=WITNESS_LIMIT_S)
        return report

    def beside(
        self, attack: Attack, attacker: Helper, witness: Helper, *, for_s: float
    ) -> dict[str, Any]:
        """Returns the figures of the honest streams while another frontend is attacked."""
        witness.ask("begin", limit_s=5)
        attacker.ask((attack.name, for_s), limit_s=for_s + attack.limit_s)
        report: dict[str, Any] = witness.ask("end", limit_s=WITNESS_LIMIT_S)
        self.settled_leftovers()
        return report

    def rss(self, component: str) -> int:
        """Returns the resident memory of a component, in bytes."""
        return int(self.processes[component].memory_info().rss)

    def refusals(self) -> dict[str, int]:
        """Returns how many clients were refused so far, by reason."""
        samples = self.stack.metrics("frontend")
        name = "orcinus_frontend_refusals_total"
        return {
            labels["reason"]: int(samples.sum(name, **labels)) for labels in samples.labels(name)
        }

    def settled_leftovers(self) -> dict[str, float]:
        """Returns the state that requests have left in the services. Waits until there is none, or
        until the time is up."""
        deadline_s = time.monotonic() + REST_LIMIT_S
        while True:
            found = leftovers(self.stack.metrics("frontend"), self.stack.metrics("scheduler"))
            if not found or time.monotonic() > deadline_s:
                return found
            time.sleep(0.2)


def _faults_of_answers(
    attack: Attack, answers: Mapping[str, int], refusals: Mapping[str, int]
) -> list[str]:
    unwanted = set(answers) - attack.answers if attack.answers else set(answers) & SERVER_ERRORS
    faults = [f"the attacker got {', '.join(sorted(unwanted))}"] if unwanted else []
    if attack.refusals and not any(refusals.get(reason) for reason in attack.refusals):
        faults.append("no refusal was counted")
    return faults


def _faults_of_honest(attack: Attack, report: Mapping[str, Any]) -> list[str]:
    unwanted = ["wrong", "broken"] if attack.may_crowd_out else ["wrong", "broken", "refused"]
    faults = [f"{what}: {report[what]}" for what in unwanted if report[what]]
    return faults if report["n_complete"] else [*faults, "no honest stream came to its end"]


def _status_bytes(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


@contextlib.contextmanager
def running(
    *,
    frontend: Mapping[str, object] | None = None,
    scheduler: Mapping[str, object] | None = None,
    api_key: str | None = None,
    honest_key: str | None = None,
    n_descriptors: int | None = None,
    **options: Any,
) -> Iterator[Pods]:
    """The demo model, served with these options of the frontend and of the scheduler."""
    environment = {
        tree.OPTIONS_VARIABLE: json.dumps(
            {"services.frontend": dict(frontend or {}), "services.scheduler": dict(scheduler or {})}
        )
    }
    if n_descriptors is not None:
        environment[tree.DESCRIPTORS_VARIABLE] = str(n_descriptors)
    options = {"kv_memory": "256MiB", "metrics": True, **options}
    with serving(MODEL, module="tests.hostile.tree", environment=environment, **options) as stack:
        yield Pods(stack, api_key=api_key, honest_key=honest_key)


@contextlib.contextmanager
def attacker_of(target: Target) -> Iterator[Helper]:
    """An attacker. It gets less of a processor than each process of the system does: on the
    internet it has processors of its own."""
    with Helper("tests.hostile.attacker", [target.to_json()], niceness=NICENESS) as helper:
        yield helper


@contextlib.contextmanager
def witness_of(pods: Pods, *, measures: bool = False) -> Iterator[Helper]:
    """Sixteen honest streams, which pause between their questions unless they measure."""
    arguments = [pods.honest_target.to_json(), *(["measure"] if measures else [])]
    with Helper("tests.hostile.witness", arguments) as helper:
        yield helper
