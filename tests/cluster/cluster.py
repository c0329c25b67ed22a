"""A cluster as a test sees it: kubectl in the namespace of the deployment, and nothing else.

Machines may be busy, and a cluster changes while a test reads its state. So each state is read
again until it is as expected, for much longer than that should take, and each failed call is
repeated. Only a state that stays wrong fails a test. Durations are printed and not judged.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

NAMESPACE = "orcinus"
CLIENT = "client"
FRONTEND = "orcinus-frontend"
PAUSE_S = 0.5
KUBECTL_TIMEOUT_S = 300
"""Timeout in seconds for one call of kubectl. It is longer than the time in which the client's pod
must answer."""
TIMEOUT_S = 600
"""Timeout in seconds for a change that a cluster makes within seconds when it has no other work."""
PATIENCE_LEFT_S = 60
"""After something was waited for in vain: the run has failed, and is to come to an end."""
HANG_S = 3600
"""Timeout in seconds for one test with its deployment. The timeout ends a hang that has no other
limit."""
GLANCE_S = 30
SIGNAL_RANK = """
import contextlib, os, pathlib, sys
ranks = []
for entry in pathlib.Path("/proc").iterdir():
    with contextlib.suppress(OSError):  # a process that has ended meanwhile
        if entry.name.isdecimal() and b"services.worker.rank" in (entry / "cmdline").read_bytes():
            ranks.append(int(entry.name))
assert len(ranks) == 1, ranks
os.kill(ranks[0], int(sys.argv[1]))
"""
OVERLAYS = Path(__file__).with_name("overlays")

T = TypeVar("T")


class NotYet(AssertionError):
    """Something is not as it should be, which may change, or could not be looked at."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod at one moment."""

    name: str
    uid: str
    ip: str
    node: str
    restarts: int
    is_ready: bool
    is_gone: bool
    """Whether it has ended, or has been told to."""
    running: tuple[str, ...]
    """Containers that run now, init containers among them."""
    started: tuple[str, ...]
    """Containers whose startup probe has passed."""


class Cluster:
    """A cluster, used by kubectl in the namespace of the deployment."""

    def __init__(self) -> None:
        self._patience_s = TIMEOUT_S

    def kubectl(
        self, *arguments: str, text: str | None = None, timeout_s: float = KUBECTL_TIMEOUT_S
    ) -> str:
        """Runs kubectl once and returns what it prints.

        Raises:
            NotYet: it failed.
        """
        call = f"kubectl {' '.join(arguments)}"
        try:
            done = subprocess.run(
                ["kubectl", *arguments],
                input=text,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotYet(f"{call}: nothing within {timeout_s:g} s") from None
        if done.returncode != 0:
            raise NotYet(f"{call}: {done.stderr}{done.stdout}")
        return done.stdout

    def in_namespace(self, *arguments: str, **options: Any) -> str:
        """kubectl in the namespace of the deployment."""
        return self.kubectl("-n", NAMESPACE, *arguments, **options)

    def get(self, *what: str) -> Any:
        """Returns objects of the namespace, or of the cluster; None where there are none."""
        found = self.insist(
            lambda: self.in_namespace("get", *what, "--ignore-not-found", "-o", "json")
        )
        return json.loads(found) if found else None

    def apply(self, overlay: Path) -> None:
        """Runs `kubectl apply -k`, again and again while deleted objects are still terminating."""
        self.insist(lambda: self.kubectl("apply", "-k", str(overlay)))

    def delete(self, overlay: Path) -> None:
        """Runs `kubectl delete -k`, and waits until all objects are gone."""
        self._end_pods()
        command = ("delete", "-k", str(overlay), "--ignore-not-found", "--wait=false")
        self.insist(lambda: self.kubectl(*command))
        self._wait_until_gone()

    def delete_namespace(self) -> None:
        """Deletes the namespace with all that is in it, and waits until it is gone."""
        self._end_pods()
        command = ("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")
        self.insist(lambda: self.kubectl(*command))
        self._wait_until_gone()

    def _end_pods(self) -> None:
        """Ends all pods, which get a second, whatever their grace period is, so streams are not
        waited for. A namespace that is deleted looks at its pods again only after half of the
        longest grace period."""
        deployments = ("delete", "deployments", "--all", "--wait=false")
        self.insist(lambda: self.in_namespace(*deployments))

        def have_ended() -> bool:
            # Each time: a deployment may make another pod at its end.
            self.in_namespace("delete", "pods", "--all", "--grace-period=1", "--wait=false")
            return self.get("pods") is None

        self.until(have_ended, what="all pods have ended", timeout_s=TIMEOUT_S)

    def _wait_until_gone(self) -> None:
        self.until(
            lambda: self.get("namespace", NAMESPACE) is None,
            what="the namespace has gone",
            timeout_s=TIMEOUT_S,
        )

    def delete_pod(self, pod: Pod, *options: str) -> None:
        """Tells this very pod to end, and none that has come in its place."""

        def delete() -> None:
            found = self.pod(pod.name)
            if found is not None and found.uid == pod.uid and not found.is_gone:
                self.in_namespace("delete", "pod", pod.name, "--wait=false", *options)

        self.insist(delete)

    def signal_rank(self, pod: Pod, number: int) -> None:
        """Sends a signal to the rank in a worker's pod.

        Raises:
            NotYet: the pod has no rank.
        """
        order = ("exec", "-i", pod.name, "--", "python", "-", str(int(number)))
        self.in_namespace(*order, text=SIGNAL_RANK)

    def pods(self, component: str) -> list[Pod]:
        """The pods of a component that are there to stay, in the order of their names."""
        found = self.get("pods", "-l", f"app.kubernetes.io/component={component}")
        pods = [_pod(item) for item in found["items"]] if found else []
        return sorted((pod for pod in pods if not pod.is_gone), key=lambda pod: pod.name)

    def pod(self, name: str) -> Pod | None:
        """One pod; None where there is none of that name at this moment."""
        found = self.get("pod", name)
        return _pod(found) if found else None

    def is_started(self, pod: str, container: str) -> bool:
        """Returns whether a container's startup probe has passed. The startup probe of a frontend
        does not depend on other pods."""
        found = self.pod(pod)
        return found is not None and container in found.started

    def nodes(self) -> list[str]:
        """The nodes that take pods at this moment."""
        return [
            node["metadata"]["name"]
            for node in self.get("nodes")["items"]
            if not node["spec"].get("unschedulable")
            and all(
                taint["effect"] == "PreferNoSchedule" for taint in node["spec"].get("taints", [])
            )
        ]

    @contextmanager
    def node_away(self, node: str) -> Iterator[None]:
        """Cuts a node off while the block runs, by the commands CUT_NODE and HEAL_NODE."""
        with _done_and_undone("CUT_NODE", "HEAL_NODE", node):
            yield

    @contextmanager
    def api_server_away(self) -> Iterator[None]:
        """Takes the API server away while the block runs, by the commands STOP_API and START_API;
        the block must not ask it for anything."""
        with _done_and_undone("STOP_API", "START_API"):
            yield

    def crds(self) -> str:
        """Returns the names of the custom resource definitions in the cluster."""
        return self.insist(lambda: self.kubectl("get", "crd", "-o", "name"))

    def leader(self) -> str:
        """Returns the name of the pod that leads. The name is empty if no pod leads."""
        lease = self.get("lease", "orcinus-scheduler") or {}
        holder: str = lease.get("spec", {}).get("holderIdentity") or ""
        return holder.partition("_")[0]

    def leading_pod(self) -> Pod:
        """The pod that leads."""

        def look() -> Pod:
            leader = self.leader()
            for pod in self.pods("scheduler"):
                if pod.name == leader:
                    return pod
            raise NotYet(f"no scheduler leads; the lease names {leader!r}")

        return self.insist(look)

    def wait_serving(self) -> None:
        """Waits until every pod there should be is ready: the frontends say so last."""
        self._wait_for_pods("worker", "deployment/orcinus-worker")
        self._wait_for_pods("scheduler", "deployment/orcinus-scheduler")
        self._wait_for_pods("frontend", "deployment/orcinus-frontend")

    def _wait_for_pods(self, component: str, workload: str) -> None:
        def are_ready() -> bool:
            made = self.get(workload)
            if made is None:
                return False
            status, n_wanted = made["status"], made["spec"]["replicas"]
            is_seen = status.get("observedGeneration") == made["metadata"]["generation"]
            counts = [
                status.get(name, 0) for name in ("replicas", "readyReplicas", "updatedReplicas")
            ]
            is_counted = is_seen and counts == [n_wanted] * len(counts)
            # Counts may be those of a moment ago.
            return (
                is_counted and [pod.is_ready for pod in self.pods(component)] == [True] * n_wanted
            )

        self.until(are_ready, what=f"{workload} is ready")

    def until_answers(self) -> float:
        """Waits for an answer over HTTP and returns the seconds it took."""
        started = time.monotonic()
        self.complete("Hello", max_tokens=1)
        return time.monotonic() - started

    def complete(self, prompt: str, **options: Any) -> Any:
        """An answer over HTTP through the frontend's Service."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **options}
        return self.insist(
            lambda: self.ask_once("complete", host=FRONTEND, port=8000, body=body),
            unless=lambda answer: answer["status"] != 200,
        )

    def until(
        self, condition: Callable[[], bool], *, what: str, timeout_s: float | None = None
    ) -> float:
        """Waits until a condition holds, and returns the seconds until then. The default timeout is
        long.

        Raises:
            NotYet: it was not within the time; says what went wrong last, and shows the pods.
        """
        limit_s = self._patience_s if timeout_s is None else timeout_s
        started = time.monotonic()
        while True:
            is_last = time.monotonic() - started > limit_s  # one look after a standstill
            trouble = ""
            try:
                if condition():
                    return time.monotonic() - started
            except NotYet as reason:
                trouble = f"{reason}\n"
            if is_last:
                if timeout_s is None:
                    self._patience_s = PATIENCE_LEFT_S
                raise NotYet(f"not within {limit_s:g} s: {what}\n{trouble}{self.report()}")
            time.sleep(PAUSE_S)

    def insist(self, action: Callable[[], T], *, unless: Callable[[T], bool] | None = None) -> T:
        """Repeats an action until it does not fail, and `unless` is not true of its result; returns
        the result."""
        results: list[T] = []

        def is_done() -> bool:
            result = action()
            if unless is not None and unless(result):
                raise NotYet(f"the result was {result}")
            results.append(result)
            return True

        self.until(is_done, what="a call succeeds")
        return results[0]

    def report(self) -> str:
        """Returns the state of the pods as text, for people. Parts that cannot be read are left
        out."""
        logs = [
            (
                "logs",
                "-l",
                f"app.kubernetes.io/component={name}",
                "--tail=15",
                "--prefix",
                "--ignore-errors",  # of pods whose containers have not started
            )
            for name in ("scheduler", "worker", "frontend")
        ]
        looks = [
            ("get", "nodes"),
            ("get", "pods", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            *logs,
        ]
        return "\n".join(self._glance(*look) for look in looks)

    def _glance(self, *arguments: str) -> str:
        try:
            lines = self.in_namespace(*arguments, timeout_s=GLANCE_S).splitlines()
        except NotYet as reason:
            return str(reason)
        return "\n".join(lines[-60:])

    def ask(self, command: str, **order: Any) -> Any:
        """Has the client's pod do something; see `overlays/client/in_pod.py`."""
        return self.insist(lambda: self.ask_once(command, **order))

    def ask_once(self, command: str, **order: Any) -> Any:
        """Has the client's pod do something, without trying again: after a failure it is not known
        whether it was done.

        Raises:
            NotYet: the client's pod was not there, or its answer was lost.
        """
        said = self.in_namespace("exec", *_client(command, order))
        try:
            return json.loads(said)
        except ValueError:
            raise NotYet(f"the client's pod said {said!r}") from None

    @contextmanager
    def load(self, **order: Any) -> Iterator["Load"]:
        """Clients that ask one thing after the other while the block runs; it starts when each of
        them has been answered."""
        load = self.insist(lambda: self._start_load(order))
        try:
            yield load
        finally:
            load.stop()

    def _start_load(self, order: Mapping[str, Any]) -> "Load":
        load = Load(["kubectl", "-n", NAMESPACE, "exec", "-i", *_client("load", order)])
        try:
            self.until(lambda: load.is_busy or load.has_ended, what="the clients are answered")
            if not load.is_busy:
                raise NotYet(f"the clients have ended: {load.errors}")
        except NotYet:
            load.stop()
            raise
        return load


class Load:
    """Clients at work."""

    def __init__(self, command: list[str]) -> None:
        # Files need no reader, while a full pipe would block the process. `stop` closes them.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._output, stderr=self._errors
        )

    @property
    def is_busy(self) -> bool:
        """Whether each client has been answered."""
        return "\n" in _content(self._output)

    @property
    def has_ended(self) -> bool:
        """Whether there are no clients any more."""
        return self._process.poll() is not None

    @property
    def errors(self) -> str:
        """The errors of the clients, in words."""
        return _content(self._errors)

    def finish(self) -> list[dict[str, Any]]:
        """Makes each client send one more request. Returns the outcomes of all requests."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.outcomes()

    def outcomes(self) -> list[dict[str, Any]]:
        """Returns the outcome of every request, once the clients are through."""
        status = self._process.wait(TIMEOUT_S)
        assert status == 0, self.errors
        outcomes: list[dict[str, Any]] = json.loads(_content(self._output).splitlines()[-1])
        return outcomes

    def stop(self) -> None:
        """Ends the clients if they still run."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._output.close()
        self._errors.close()


@contextmanager
def _done_and_undone(do: str, undo: str, *arguments: str) -> Iterator[None]:
    """Runs the commands that two variables name, before the block and after it."""
    commands = [os.environ.get(name, "").split() for name in (do, undo)]
    if not all(commands):
        pytest.skip(f"{do} and {undo} must name commands")
    subprocess.run([*commands[0], *arguments], check=True, timeout=KUBECTL_TIMEOUT_S)
    try:
        yield
    finally:
        subprocess.run([*commands[1], *arguments], check=True, timeout=KUBECTL_TIMEOUT_S)


def _content(file: Any) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode()  # the writer's place in it stays


def _client(command: str, order: Mapping[str, Any]) -> list[str]:
    return [CLIENT, "--", "python", "/client/in_pod.py", command, json.dumps(order)]


def _pod(item: dict[str, Any]) -> Pod:
    status = item["status"]
    containers = status.get("containerStatuses", [])
    conditions = {entry["type"]: entry["status"] for entry in status.get("conditions", [])}
    has_ended = status.get("phase") in ("Failed", "Succeeded")
    return Pod(
        name=item["metadata"]["name"],
        uid=item["metadata"]["uid"],
        ip=status.get("podIP", ""),
        node=item["spec"].get("nodeName", ""),
        restarts=sum(container["restartCount"] for container in containers),
        is_ready=conditions.get("Ready") == "True",
        is_gone=has_ended or "deletionTimestamp" in item["metadata"],
        running=tuple(
            container["name"]
            for container in status.get("initContainerStatuses", []) + containers
            if "running" in container.get("state", {})
        ),
        started=tuple(container["name"] for container in containers if container.get("started")),
    )
