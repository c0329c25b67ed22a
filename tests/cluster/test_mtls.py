"""TLS on every hop, and who gets in."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests.certificates import Authority
from tests.cluster.cluster import FRONTEND, HANG_S, NAMESPACE, OVERLAYS, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(HANG_S)]

KEY = "orc-a-key-for-a-test"
ROLES = ("orcinus-frontend", "orcinus-scheduler", "orcinus-worker")
OURS, STRANGER = "ours", "a stranger"
PROMPT = "If the file does not exist,"
REFUSED = re.compile(r"BadStatusLine|RemoteDisconnected|ConnectionReset")
"""Errors of a client that a server is there for, but does not understand."""


@cache
def authority(name: str) -> Authority:
    """The one of that name, made when it is first asked for: its certificates last for an hour."""
    return Authority(name)


def ours() -> str:
    """Returns the certificate of the authority that a client of ours trusts, in PEM."""
    return authority(OURS).certificate.decode()


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
    """Returns the Secrets that an administrator makes before the component is applied."""
    made = []
    for role in ROLES:
        pem = authority(OURS).issue(role)
        made.append(
            secret(
                f"{role}-tls",
                tls__crt=pem.certificate,
                tls__key=pem.key,
                ca__crt=authority(OURS).certificate,
            )
        )
    public = authority(OURS).issue(FRONTEND, f"{FRONTEND}.{NAMESPACE}.svc")
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
    try:
        cluster.insist(lambda: cluster.kubectl("apply", "-f", "-", text=json.dumps(items)))
        cluster.apply(overlay)
        cluster.wait_serving()
        yield cluster
    finally:
        cluster.delete(overlay)


def complete(cluster: Cluster, **order: Any) -> int:
    """The HTTP status of a completion over HTTPS."""
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    answer = cluster.insist(
        lambda: cluster.ask_once(
            "complete", host=FRONTEND, port=8000, ca=ours(), body=body, **order
        ),
        unless=lambda answer: answer["status"] in (0, 503),
    )
    status: int = answer["status"]
    return status


def generate(cluster: Cluster, expected: str, **order: Any) -> str:
    """The status of a generation over gRPC."""
    target = f"{FRONTEND}:50051"
    options = {"max_tokens": 4}
    return code_of(
        cluster,
        lambda: cluster.ask_once(
            "generate", target=target, prompt=PROMPT, options=options, **order
        ),
        expected,
    )


def code_of(cluster: Cluster, ask: Callable[[], Any], expected: str) -> str:
    """The status of a call. That nobody answered in time proves nothing, unless that is expected:
    then somebody did not talk to the client."""
    busy = {"UNAVAILABLE", "DEADLINE_EXCEEDED"} - {expected}
    code: str = cluster.insist(ask, unless=lambda answer: answer["code"] in busy)["code"]
    return code


@dataclass(frozen=True)
class Identity:
    """The certificate that a caller shows, and whether he uses TLS at all."""

    role: str = ""
    authority: str = OURS
    is_plaintext: bool = False

    def credentials(self) -> dict[str, str]:
        """The certificates of an order."""
        if self.is_plaintext:
            return {}
        if not self.role:
            return {"ca": ours()}
        pem = authority(self.authority).issue(self.role)
        return {"certificate": pem.certificate.decode(), "key": pem.key.decode(), "ca": ours()}


def test_with_a_key_both_protocols_answer(guarded: Cluster) -> None:
    bearer = f"Bearer {KEY}"
    assert complete(guarded, headers={"Authorization": bearer}) == 200
    assert generate(guarded, "OK", ca=ours(), metadata={"authorization": bearer}) == "OK"


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer orc-wrong"}], ids=["none", "wrong"]
)
def test_without_a_key_nobody_gets_an_answer(guarded: Cluster, headers: dict[str, str]) -> None:
    assert complete(guarded, headers=headers) == 401
    metadata = {name.lower(): value for name, value in headers.items()}
    expected = "UNAUTHENTICATED"
    assert generate(guarded, expected, ca=ours(), metadata=metadata) == expected


def test_a_client_in_plaintext_is_refused(guarded: Cluster) -> None:
    expected = "UNAVAILABLE"
    metadata = {"authorization": f"Bearer {KEY}"}
    assert generate(guarded, expected, metadata=metadata) == expected
    answer = guarded.insist(
        lambda: guarded.ask_once("complete", host=FRONTEND, port=8000, body={"prompt": PROMPT}),
        unless=lambda answer: answer["status"] == 0 and not REFUSED.match(answer["body"]["error"]),
    )
    assert answer["status"] == 0, answer


@pytest.mark.parametrize(
    ("identity", "code"),
    [
        (Identity(is_plaintext=True), "UNAVAILABLE"),
        (Identity(), "UNAVAILABLE"),
        (Identity("orcinus-frontend", STRANGER), "UNAVAILABLE"),
        (Identity("orcinus-worker"), "PERMISSION_DENIED"),
        (Identity("orcinus-frontend"), "OK"),
    ],
    ids=["plaintext", "no certificate", "another authority", "a worker", "a frontend"],
)
def test_frontends_alone_reach_the_scheduler(
    guarded: Cluster, identity: Identity, code: str
) -> None:
    def connect() -> Any:
        target = f"{guarded.leading_pod().ip}:50052"
        order = {"target": target, "name": "orcinus-scheduler", **identity.credentials()}
        return guarded.ask_once("connect_scheduler", **order)

    assert code_of(guarded, connect, code) == code


@pytest.mark.parametrize(
    ("identity", "code"),
    [
        (Identity(is_plaintext=True), "UNAVAILABLE"),
        (Identity(), "UNAVAILABLE"),
        (Identity("orcinus-scheduler", STRANGER), "UNAVAILABLE"),
        (Identity("orcinus-frontend"), "PERMISSION_DENIED"),
        (Identity("orcinus-scheduler"), "OK"),
    ],
    ids=["plaintext", "no certificate", "another authority", "a frontend", "a scheduler"],
)
def test_the_scheduler_alone_reaches_a_worker(
    guarded: Cluster, identity: Identity, code: str
) -> None:
    def describe() -> Any:
        target = f"{guarded.pods('worker')[0].ip}:50053"
        order = {"target": target, "name": "orcinus-worker", **identity.credentials()}
        return guarded.ask_once("describe_worker", **order)

    assert code_of(guarded, describe, code) == code
