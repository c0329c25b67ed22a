"""TLS on every hop, and who gets in."""

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.certificates import Authority
from tests.cluster.cluster import FRONTEND, NAMESPACE, OVERLAYS, READY_TIMEOUT_S, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

KEY = "orc-a-key-for-a-test"
ROLES = ("orcinus-frontend", "orcinus-scheduler", "orcinus-worker")
PROMPT = "If the file does not exist,"
AUTHORITY = Authority()
STRANGER = Authority("a stranger")
OURS = AUTHORITY.certificate.decode()


def secret(name: str, **files: bytes) -> dict[str, Any]:
    """A Secret of the deployment; a dot in a file's name is written as two underscores."""
    data = {
        file.replace("__", "."): base64.b64encode(content).decode()
        for file, content in files.items()
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "data": data,
    }


def secrets() -> list[dict[str, Any]]:
    """What an administrator makes before the component is applied."""
    made = []
    for role in ROLES:
        pem = AUTHORITY.issue(role)
        made.append(
            secret(
                f"{role}-tls",
                tls__crt=pem.certificate,
                tls__key=pem.key,
                ca__crt=AUTHORITY.certificate,
            )
        )
    public = AUTHORITY.issue(FRONTEND, f"{FRONTEND}.{NAMESPACE}.svc")
    made.append(secret("orcinus-public-tls", tls__crt=public.certificate, tls__key=public.key))
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys = {"keys": [{"name": "tester", "sha256": digest}]}
    made.append(secret("orcinus-api-keys", **{"api-keys__json": json.dumps(keys).encode()}))
    return made


@pytest.fixture(scope="module")
def guarded(cluster: Cluster) -> Iterator[Cluster]:
    """The demo behind certificates and keys."""
    overlay = OVERLAYS / "mtls"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    items = {"apiVersion": "v1", "kind": "List", "items": [namespace, *secrets()]}
    cluster.kubectl("apply", "-f", "-", text=json.dumps(items))
    cluster.apply(overlay)
    try:
        cluster.wait_serving()
        yield cluster
    finally:
        cluster.delete(overlay)


def complete(cluster: Cluster, **order: Any) -> Any:
    """A completion over HTTPS."""
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    return cluster.ask("complete", host=FRONTEND, port=8000, ca=OURS, body=body, **order)


def generate(cluster: Cluster, **order: Any) -> str:
    """The status of a generation over gRPC."""
    target = f"{FRONTEND}:50051"
    options = {"max_tokens": 4}
    answer = cluster.ask("generate", target=target, prompt=PROMPT, options=options, **order)
    code: str = answer["code"]
    return code


def credentials(authority: Authority, role: str) -> dict[str, str]:
    """A certificate for a role."""
    pem = authority.issue(role)
    return {"certificate": pem.certificate.decode(), "key": pem.key.decode(), "ca": OURS}


def test_with_a_key_both_protocols_answer(guarded: Cluster) -> None:
    bearer = f"Bearer {KEY}"
    guarded.until(
        lambda: complete(guarded, headers={"Authorization": bearer})["status"] == 200,
        timeout_s=READY_TIMEOUT_S,
        what="an answer over HTTPS",
    )
    assert generate(guarded, ca=OURS, metadata={"authorization": bearer}) == "OK"


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer orc-wrong"}], ids=["none", "wrong"]
)
def test_without_a_key_nobody_gets_an_answer(guarded: Cluster, headers: dict[str, str]) -> None:
    assert complete(guarded, headers=headers)["status"] == 401
    metadata = {name.lower(): value for name, value in headers.items()}
    assert generate(guarded, ca=OURS, metadata=metadata) == "UNAUTHENTICATED"


def test_a_client_in_plaintext_is_refused(guarded: Cluster) -> None:
    assert generate(guarded, metadata={"authorization": f"Bearer {KEY}"}) == "UNAVAILABLE"
    with pytest.raises(AssertionError, match=r"BadStatusLine|RemoteDisconnected|ConnectionReset"):
        guarded.ask("complete", host=FRONTEND, port=8000, body={"prompt": PROMPT})


@pytest.mark.parametrize(
    ("identity", "code"),
    [
        ({}, "UNAVAILABLE"),
        ({"ca": OURS}, "UNAVAILABLE"),
        (credentials(STRANGER, "orcinus-frontend"), "UNAVAILABLE"),
        (credentials(AUTHORITY, "orcinus-worker"), "PERMISSION_DENIED"),
        (credentials(AUTHORITY, "orcinus-frontend"), "OK"),
    ],
    ids=["plaintext", "no certificate", "another authority", "a worker", "a frontend"],
)
def test_frontends_alone_reach_the_scheduler(
    guarded: Cluster, identity: dict[str, str], code: str
) -> None:
    [leader] = [pod for pod in guarded.pods("scheduler") if pod.name == guarded.leader()]
    answer = guarded.ask(
        "connect_scheduler", target=f"{leader.ip}:50052", name="orcinus-scheduler", **identity
    )
    assert answer["code"] == code, answer


@pytest.mark.parametrize(
    ("identity", "code"),
    [
        ({}, "UNAVAILABLE"),
        ({"ca": OURS}, "UNAVAILABLE"),
        (credentials(STRANGER, "orcinus-scheduler"), "UNAVAILABLE"),
        (credentials(AUTHORITY, "orcinus-frontend"), "PERMISSION_DENIED"),
        (credentials(AUTHORITY, "orcinus-scheduler"), "OK"),
    ],
    ids=["plaintext", "no certificate", "another authority", "a frontend", "a scheduler"],
)
def test_the_scheduler_alone_reaches_a_worker(
    guarded: Cluster, identity: dict[str, str], code: str
) -> None:
    worker = guarded.pods("worker")[0]
    answer = guarded.ask(
        "describe_worker", target=f"{worker.ip}:50053", name="orcinus-worker", **identity
    )
    assert answer["code"] == code, answer
