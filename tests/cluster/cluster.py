"""A cluster as a test sees it: kubectl in the namespace of the deployment, and nothing else."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMESPACE = "orcinus"
CLIENT = "client"
FRONTEND = "orcinus-frontend"
KUBECTL_TIMEOUT_S = 180
READY_TIMEOUT_S = 180
IN_POD = Path(__file__).with_name("in_pod.py")
OVERLAYS = Path(__file__).with_name("overlays")


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod at one moment."""

    name: str
    uid: str
    ip: str
    node: str
    restarts: int
    is_ready: bool
    is_leaving: bool
    running: tuple[str, ...]
    """Containers that run now, init containers among them."""
    started: tuple[str, ...]
    """Containers whose startup probe has passed."""

    def is_waiting_at(self, gate: str) -> bool:
        """Whether it is held up by an init container."""
        return gate in self.running


class Cluster:
    """kubectl, and what becomes of pods."""

    def kubectl(
        self, *arguments: str, text: str | None = None, timeout_s: float = KUBECTL_TIMEOUT_S
    ) -> str:
        """Runs kubectl and returns what it prints.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            ["kubectl", *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}{done.stdout}"
        return done.stdout

    def in_namespace(self, *arguments: str, **options: Any) -> str:
        """kubectl in the namespace of the deployment."""
        return self.kubectl("-n", NAMESPACE, *arguments, **options)

    def apply(self, overlay: Path) -> None:
        """`kubectl apply -k`."""
        self.kubectl("apply", "-k", str(overlay))

    def delete(self, overlay: Path) -> None:
        """`kubectl delete -k`, and nothing of it is left."""
        self.kubectl("delete", "-k", str(overlay), "--ignore-not-found", "--wait=true")

    def pods(self, component: str) -> list[Pod]:
        """The pods of a component, in the order of their names."""
        selector = f"app.kubernetes.io/component={component}"
        items = json.loads(self.in_namespace("get", "pods", "-l", selector, "-o", "json"))["items"]
        return sorted((_pod(item) for item in items), key=lambda pod: pod.name)

    def pod(self, name: str) -> Pod | None:
        """One pod; None where there is none of that name at this moment."""
        found = self.in_namespace("get", "pod", name, "--ignore-not-found", "-o", "json")
        return _pod(json.loads(found)) if found else None

    def is_started(self, pod: str, container: str) -> bool:
        """Whether a container's startup probe has passed; a frontend's needs nobody else."""
        found = self.pod(pod)
        return found is not None and container in found.started

    def leader(self) -> str:
        """The name of the pod that leads; empty if none does."""
        lease = json.loads(self.in_namespace("get", "lease", "orcinus-scheduler", "-o", "json"))
        holder: str = lease.get("spec", {}).get("holderIdentity") or ""
        return holder.partition("_")[0]

    def wait_serving(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until every pod there should be is ready: the frontends say so last."""
        for name in ("statefulset/orcinus-worker", "deployment/orcinus-scheduler"):
            self._wait_for_replicas(name, timeout_s)
        self._wait_for_replicas("deployment/orcinus-frontend", timeout_s)

    def until_answers(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Waits for an answer over HTTP and returns the seconds it took."""

        def answers() -> bool:
            try:
                return bool(self.complete("Hello", max_tokens=1)["status"] == 200)
            except AssertionError:  # the client or the frontend is not there yet
                return False

        return self.until(answers, timeout_s=timeout_s, what="an answer over HTTP")

    def complete(self, prompt: str, **options: Any) -> Any:
        """A completion over HTTP through the frontend's Service."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **options}
        return self.ask("complete", host=FRONTEND, port=8000, body=body)

    def _wait_for_replicas(self, name: str, timeout_s: float) -> None:
        def are_ready() -> bool:
            workload = json.loads(self.in_namespace("get", name, "-o", "json"))
            status = workload["status"]
            n_wanted = workload["spec"]["replicas"]
            is_seen = status.get("observedGeneration") == workload["metadata"]["generation"]
            n_ready, n_pods = status.get("readyReplicas", 0), status.get("replicas", 0)
            return bool(is_seen and n_ready == n_pods == n_wanted)

        self.until(are_ready, timeout_s=timeout_s, what=f"{name} is ready")

    def until(self, condition: Callable[[], bool], *, timeout_s: float, what: str) -> float:
        """Waits for something and returns the seconds it took; shows the pods if it fails."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > timeout_s:
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.report()}")
            time.sleep(0.2)
        return time.monotonic() - started

    def report(self) -> str:
        """What a person would look at first."""
        pods = self.in_namespace("get", "pods", "-o", "wide")
        logs = [
            self.in_namespace(
                "logs",
                "-l",
                f"app.kubernetes.io/component={name}",
                "--tail=15",
                "--prefix",
                "--ignore-errors",  # of pods whose containers have not started
            )
            for name in ("scheduler", "worker", "frontend")
        ]
        return "\n".join((pods, *logs))

    def ask(self, command: str, **order: Any) -> Any:
        """Has the client's pod do something; see `in_pod.py`."""
        return json.loads(self.in_namespace(*_exec(command, order), text=IN_POD.read_text()))

    @contextmanager
    def load(self, **order: Any) -> Iterator["Load"]:
        """Clients that ask one thing after the other while the block runs."""
        load = Load(["kubectl", "-n", NAMESPACE, *_exec("load", order)])
        try:
            yield load
        finally:
            load.stop()


class Load:
    """Clients at work."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(IN_POD.read_text())
        self._process.stdin.close()
        self._process.stdin = None  # else `communicate` would flush it

    def outcomes(self, timeout_s: float = 300) -> list[dict[str, Any]]:
        """What became of every request, when the clients are through."""
        output, _ = self._process.communicate(timeout=timeout_s)
        assert self._process.returncode == 0
        outcomes: list[dict[str, Any]] = json.loads(output)
        return outcomes

    def stop(self) -> None:
        """Ends the clients if they still run."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _exec(command: str, order: Mapping[str, Any]) -> list[str]:
    return ["exec", "-i", CLIENT, "--", "python", "-", command, json.dumps(order)]


def _pod(item: dict[str, Any]) -> Pod:
    status = item["status"]
    containers = status.get("containerStatuses", [])
    conditions = {entry["type"]: entry["status"] for entry in status.get("conditions", [])}
    return Pod(
        name=item["metadata"]["name"],
        uid=item["metadata"]["uid"],
        ip=status.get("podIP", ""),
        node=item["spec"].get("nodeName", ""),
        restarts=sum(container["restartCount"] for container in containers),
        is_ready=conditions.get("Ready") == "True",
        is_leaving="deletionTimestamp" in item["metadata"],
        running=tuple(
            container["name"]
            for container in status.get("initContainerStatuses", []) + containers
            if "running" in container["state"]
        ),
        started=tuple(container["name"] for container in containers if container.get("started")),
    )
