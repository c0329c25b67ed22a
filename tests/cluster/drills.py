"""Stops and kills each process of a deployment under load, and writes down how long clients waited.

    python -m tests.cluster.drills        # `make drills` loads the images before

The demo overlay is deployed on the cluster of KUBECONFIG with one spare worker, and deleted at the
end. KILL_POD is a command that sends SIGKILL to the first process of the container of a pod, whose
name follows: no process inside a container can do that. Two kinds of clients run meanwhile: some
stream answers, and resume their streams where a frontend is lost; the others send one short request
after the other. Each drill runs three times. The table below the comment `<!-- drills -->` in
`docs/operations/lose-a-node.md` has the median of the longest waits.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import semconv
from tests.cluster.cluster import (
    FRONTEND,
    KUBECTL_TIMEOUT_S,
    NAMESPACE,
    OVERLAYS,
    Cluster,
    NotYet,
    Pod,
)
from tests.cluster.streams import PROMPT

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "lose-a-node.md"
TABLE = re.compile(r"(?<=^<!-- drills -->\n\n)(\|.*\n)+", re.M)

STREAMS: dict[str, Any] = {
    "host": FRONTEND,
    "port": 8000,
    "clients": 8,
    "streams": [{"prompt": PROMPT, "max_tokens": 150, "seed": 5}],
}
NEW_REQUESTS: dict[str, Any] = {
    "host": FRONTEND,
    "port": 8000,
    "clients": 4,
    "pause_s": 0.2,
    "streams": [{"prompt": PROMPT, "max_tokens": 1}],
}


N_TIMES = 3
"""How often each process is stopped, and killed."""

N_SPARES = 1
SETTLE_S = 15.0
"""Between two drills. A pod is ready before its processes have imported all that they will need."""

METRICS = "localhost:9464"


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest waits of clients during a drill, in seconds."""

    stream_s: float
    """Between two tokens of a stream."""

    new_request_s: float
    """Until the first token of a new request."""


@dataclass(frozen=True, slots=True)
class Drill:
    """A process, where it runs, and the two ways in which it is ended."""

    name: str
    find: Callable[[Cluster], Pod]
    stop: Callable[[Cluster, Pod], None]
    kill: Callable[[Cluster, Pod], None]


def delete(cluster: Cluster, pod: Pod) -> None:
    """Has the pod end politely, within its grace period."""
    cluster.delete_pod(pod)


def kill(cluster: Cluster, pod: Pod) -> None:
    """Sends SIGKILL to the first process of the pod's container."""
    command = [*os.environ["KILL_POD"].split(), pod.name, "-n", NAMESPACE]
    subprocess.run(command, check=True, timeout=KUBECTL_TIMEOUT_S)


def signal_rank(number: int) -> Callable[[Cluster, Pod], None]:
    """Returns a function that sends a signal to the rank of a worker's pod."""

    return lambda cluster, pod: cluster.signal_rank(pod, number)


def first(component: str) -> Callable[[Cluster], Pod]:
    """Returns a function that finds the first pod of a component."""
    return lambda cluster: cluster.pods(component)[0]


def serving_worker(cluster: Cluster) -> Pod:
    """Returns a worker that serves a stage, and not the spare."""

    def look() -> Pod:
        metrics = ("python", "-m", "services.common.show_metrics", METRICS, semconv.WEIGHTS_LOADED)
        for pod in cluster.pods("worker"):
            if cluster.in_namespace("exec", pod.name, "--", *metrics):  # it prints no zeros
                return pod
        raise NotYet("no worker has loaded weights")

    return cluster.insist(look)


def standby(cluster: Cluster) -> Pod:
    """Returns the scheduler that does not lead."""
    leader = cluster.leading_pod()
    return next(pod for pod in cluster.pods("scheduler") if pod.uid != leader.uid)


DRILLS = (
    Drill("leading scheduler", Cluster.leading_pod, delete, kill),
    Drill("standby scheduler", standby, delete, kill),
    Drill("controller, with its ranks", serving_worker, delete, kill),
    Drill("rank", serving_worker, signal_rank(15), signal_rank(9)),
    Drill("frontend", first("frontend"), delete, kill),
)


def median(waits: Sequence[Waits]) -> Waits:
    """Returns the median of each wait."""
    return Waits(
        statistics.median(found.stream_s for found in waits),
        statistics.median(found.new_request_s for found in waits),
    )


def repeat(cluster: Cluster, drill: Drill) -> tuple[str, Waits, Waits]:
    """Stops and kills a process in turns; returns its name and the medians of both."""
    stopped, killed = [], []
    for _ in range(N_TIMES):
        stopped.append(run(cluster, drill, drill.stop))
        killed.append(run(cluster, drill, drill.kill))
    return drill.name, median(stopped), median(killed)


def run(cluster: Cluster, drill: Drill, end: Callable[[Cluster, Pod], None]) -> Waits:
    """Ends a process while clients are served; returns how long they waited until everything was
    as before."""
    cluster.wait_serving()
    time.sleep(SETTLE_S)
    pod = drill.find(cluster)

    def has_ended() -> bool:
        now = cluster.pod(pod.name)
        return now is None or now.uid != pod.uid or now.restarts > pod.restarts

    with cluster.load(**STREAMS) as streams, cluster.load(**NEW_REQUESTS) as new_requests:
        end(cluster, pod)
        cluster.until(has_ended, what=f"{drill.name} has ended")
        cluster.wait_serving()
        waits = Waits(
            max(found["longest_gap_s"] for found in outcomes(streams.finish())),
            max(found["first_token_s"] for found in outcomes(new_requests.finish())),
        )
    sys.stdout.write(f"{drill.name}: {waits}\n")
    sys.stdout.flush()
    return waits


def outcomes(ended: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the outcome of each stream. Fails if a stream was lost."""
    for outcome in ended:
        assert outcome["status"] == 200, outcome
        yield outcome["stream"]


def table(found: list[tuple[str, Waits, Waits]]) -> str:
    """Returns the table of the page."""
    lines = [
        "| process | stopped: a stream waits | stopped: a new request waits "
        "| killed: a stream waits | killed: a new request waits |",
        "|---|---|---|---|---|",
    ]
    for name, stopped, killed in found:
        seconds = (
            *(stopped.stream_s, stopped.new_request_s),
            *(killed.stream_s, killed.new_request_s),
        )
        lines.append(f"| {name} | {' | '.join(f'{value:.1f} s' for value in seconds)} |")
    return "\n".join(lines) + "\n"


@contextmanager
def deployed() -> Iterator[Cluster]:
    """Deploys the demo overlay with a spare worker, and deletes it at the end."""
    cluster, overlay = Cluster(), OVERLAYS / "demo"
    try:
        cluster.apply(overlay)
        cluster.until_answers()
        n_replicas = cluster.get("deployment/orcinus-worker")["spec"]["replicas"] + N_SPARES
        cluster.in_namespace("scale", "deployment/orcinus-worker", f"--replicas={n_replicas}")
        yield cluster
    finally:
        cluster.delete(overlay)


def main() -> None:
    """Runs all drills and writes the page."""
    for name in ("KUBECONFIG", "KILL_POD"):
        if not os.environ.get(name):
            sys.exit(f"error: {name} must be set; see {__name__}")
    with deployed() as cluster:
        found = [repeat(cluster, drill) for drill in DRILLS]
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(table(found), text), encoding="utf-8")


if __name__ == "__main__":
    main()
