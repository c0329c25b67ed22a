"""Every process, with the settings of its manifest, listens where `docs/security.md` says, and
speaks and asks for what it says there.

Each process has an address of loopback for itself, as a pod has, so that ports are the manifests'.
"""

import hashlib
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from services.common.address import Address
from tests.certificates import Authority, mount
from tests.k8s.manifests import environment, rendered
from tests.limits import HANG_S
from tests.listeners import Listener, table

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 200
HANDSHAKE_S = 3.0
KEY = "orc-a-key-for-a-test"
AUTHORITY = Authority()
ROLES = {
    "frontend": "orcinus-frontend",
    "scheduler": "orcinus-scheduler",
    "worker": "orcinus-worker",
}


@dataclass
class Pod:
    """A process and the address that it may listen on."""

    component: str
    address: str
    process: subprocess.Popen[bytes]

    def listening(self) -> set[tuple[str, int]]:
        """Addresses and ports on which the process and its children take connections."""
        own = psutil.Process(self.process.pid)
        return {
            (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
            for process in [own, *own.children(recursive=True)]
            for connection in process.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }


@dataclass
class Deployment:
    """A pipeline of two stages, its processes set up as in pods."""

    has_tls: bool
    pods: list[Pod] = field(default_factory=list)

    @property
    def frontend(self) -> str:
        """URL of the frontend."""
        (pod,) = (pod for pod in self.pods if pod.component == "frontend")
        return f"{'https' if self.has_tls else 'http'}://{Address(pod.address, 8000)}"

    def get(self, path: str) -> int:
        """Returns the status of an answer to a client without a key; 0 if there is none yet."""
        try:
            return httpx.get(f"{self.frontend}{path}", verify=False, timeout=HANG_S).status_code
        except httpx.TransportError:
            return 0

    def wait_until_it_serves(self) -> None:
        """Waits for a pipeline."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.get("/serving") != 200:
            ended = [pod.component for pod in self.pods if pod.process.poll() is not None]
            assert not ended
            assert time.monotonic() < deadline
            time.sleep(0.1)


def secrets(directory: Path) -> dict[str, str]:
    """Returns the paths of a composition with `mtls`, and those that stand in for them."""
    for role in ROLES.values():
        AUTHORITY.mount(directory / role, role)
    AUTHORITY.mount(directory / "public", "localhost")
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys = json.dumps({"keys": [{"name": "tester", "sha256": digest}]}).encode()
    mount(directory / "keys", {"api-keys.json": keys})
    return {
        "/etc/orcinus/public-tls": str(directory / "public"),
        "/etc/orcinus/api-keys": str(directory / "keys"),
    }


@contextmanager
def deployed(name: str, model: Path, directory: Path, *, network: str = "") -> Iterator[Deployment]:
    """The processes of a composition, which serve. Their addresses begin with `network`, or with
    some part of loopback."""
    manifests = rendered(name)
    network = network or f"127.{random.randrange(1, 255)}.{random.randrange(256)}."
    stages = [f"{network}{index + 1}" for index in range(2)]
    scheduler, frontend = f"{network}11", f"{network}21"
    stand_ins = secrets(directory)
    given = {
        "ORCINUS_MODEL": str(model),
        "ORCINUS_SCHEDULER": str(Address(scheduler, 50052)),
        "ORCINUS_STAGES": ",".join(str(Address(stage, 50053)) for stage in stages),
        "ORCINUS_KV_MEMORY": "16MiB",
    }
    of_stage = [{"ORCINUS_STAGE_INDEX": str(index), "ORCINUS_N_STAGES": "2"} for index in range(2)]
    places = [
        *(("worker", stage, own) for stage, own in zip(stages, of_stage, strict=True)),
        ("scheduler", scheduler, {"ORCINUS_STAGES": given["ORCINUS_STAGES"]}),
        ("frontend", frontend, {}),
    ]
    deployment = Deployment(name == "mtls")
    with ExitStack() as stack:
        for component, address, own in places:
            settings = environment(manifests, manifests.workload(component))
            settings.pop("ORCINUS_LEASE_NAME", None)  # there is no API server
            known = {key: value for key, value in given.items() if key in settings}
            settings |= known | own
            for variable, value in settings.items():
                moved = value.replace("[::]:", str(Address(address, 0)).removesuffix("0"))
                moved = moved.replace("/etc/orcinus/tls", str(directory / ROLES[component]))
                for path, stand_in in stand_ins.items():
                    moved = moved.replace(path, stand_in)
                settings[variable] = moved
            if "ORCINUS_DATA_HOST" in settings:
                settings["ORCINUS_DATA_HOST"] = address
            process = subprocess.Popen(
                [sys.executable, "-m", f"services.{component}"],
                cwd=ROOT,
                env={**os.environ, **settings},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            deployment.pods.append(Pod(component, address, process))
        deployment.wait_until_it_serves()
        yield deployment


def speaks_tls(address: tuple[str, int], *, is_known: bool, directory: Path) -> bool:
    """Whether a listener lets in a client that speaks TLS, with our certificate or without one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    if is_known:
        files = directory / ROLES["scheduler"]
        context.load_cert_chain(files / "tls.crt", files / "tls.key")
    try:
        with (
            socket.create_connection(address, HANDSHAKE_S) as plain,
            context.wrap_socket(plain) as connection,
        ):
            connection.settimeout(1.0)
            try:
                return connection.recv(1) != b""  # a server that refuses ends the connection
            except TimeoutError:
                return True  # it waits for the client
    except (ssl.SSLError, OSError):
        return False


@pytest.mark.parametrize("name", ["base", "mtls"])
def test_processes_listen_where_the_table_says_and_nowhere_else(
    name: str, model: Path, tmp_path: Path
) -> None:
    with deployed(name, model, tmp_path) as deployment:
        seen: dict[str, set[int]] = {}
        for pod in deployment.pods:
            found = pod.listening()
            assert {ip for ip, _ in found} == {pod.address}, "a process listens elsewhere, too"
            seen.setdefault(pod.component, set()).update(port for _, port in found)
        for component, ports in seen.items():
            rows = [row for row in table() if row.process == component]
            fixed = {row.port for row in rows if row.port is not None}
            assert fixed <= ports
            assert bool(ports - fixed) == any(row.port is None for row in rows), ports
        assert deployment.get("/health") == 200
        assert deployment.get("/v1/models") == (401 if deployment.has_tls else 200)
        for row, address in reached(deployment):
            is_open = speaks_tls(address, is_known=True, directory=tmp_path)
            assert is_open == (deployment.has_tls and row.is_encrypted), row
            if row.wants_a_certificate:
                assert not speaks_tls(address, is_known=False, directory=tmp_path), row


def reached(deployment: Deployment) -> Iterator[tuple[Listener, tuple[str, int]]]:
    """Every row of the table with each address at which it is there."""
    for pod in deployment.pods:
        rows = {row.port: row for row in table() if row.process == pod.component}
        for address, port in sorted(pod.listening(), key=lambda it: it[1] not in rows):
            yield rows.get(port) or rows[None], (address, port)
