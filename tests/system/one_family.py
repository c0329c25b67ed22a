"""`python -m tests.system.one_family local|manifests MODEL DIRECTORY`: serves a model where there
are only IPv6 addresses, and asks it by each protocol.

`local` is `services.local`; `manifests` are the processes of `k8s/base`, each with an address of
its own, as pods have. Both must be started in a network namespace of their own, which loses its
IPv4 addresses here.
"""

import subprocess
import sys
from pathlib import Path

import httpx
from orcinus.v1 import inference_pb2

from tests.limits import HANG_S
from tests.system.stack import serving
from tests.system.test_listeners import deployed

PROMPT = [5, 6, 7]
N_TOKENS = 4
NETWORK = "fd00:10:244"


def leave_ipv6() -> None:
    """Leaves this network namespace the loopback device with IPv6 addresses alone."""
    commands = ["ip link set lo up", "ip -4 address flush dev lo"]
    commands += [f"ip -6 address add {NETWORK}::{index}/128 dev lo nodad" for index in range(1, 32)]
    for command in commands:
        subprocess.run(command.split(), check=True, timeout=HANG_S)


def try_local(model: Path) -> None:
    """Asks a local system of two stages."""
    with serving(model, stages=2, metrics=True) as stack:
        assert stack.http.startswith("http://[::1]:"), stack.output
        assert stack.grpc.startswith("[::1]:"), stack.output
        assert len(stack.complete(PROMPT, max_tokens=N_TOKENS)["token_ids"]) == N_TOKENS
        assert httpx.get(f"{stack.http}/").status_code == 200
        with stack.inference() as inference:
            inference.DescribeModel(inference_pb2.DescribeModelRequest(), timeout=HANG_S)
        for service in ("stage 0", "stage 1", "scheduler", "frontend"):
            assert stack.metrics(service).names


def try_manifests(model: Path, directory: Path) -> None:
    """Asks the processes of the manifests."""
    with deployed("base", model, directory, network=f"{NETWORK}::") as deployment:
        for pod in deployment.pods:
            assert {ip for ip, _ in pod.listening()} == {pod.address}
        body = {"prompt": PROMPT, "max_tokens": N_TOKENS, "return_token_ids": True}
        answer = httpx.post(f"{deployment.frontend}/v1/completions", json=body, timeout=HANG_S)
        assert len(answer.json()["choices"][0]["token_ids"]) == N_TOKENS, answer.text


def main() -> None:
    what, model, directory = sys.argv[1:]
    leave_ipv6()
    if what == "local":
        try_local(Path(model))
    else:
        try_manifests(Path(model), Path(directory))


if __name__ == "__main__":
    main()
