"""What a client does inside the cluster; `kubectl exec` runs it in a pod of the frontend's image.

    python - COMMAND JSON < in_pod.py

It knows nothing of the tests around it and prints one line of JSON. Only what the image holds is
imported: the standard library, gRPC and the contracts.
"""

import http.client
import json
import ssl
import sys
import threading
import time
from typing import Any

import grpc
from orcinus.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

TIMEOUT_S = 60


def connection(order: dict[str, Any]) -> http.client.HTTPConnection:
    """To the frontend's Service."""
    if "ca" in order:
        context = ssl.create_default_context(cadata=order["ca"])
        return http.client.HTTPSConnection(
            order["host"], order["port"], timeout=TIMEOUT_S, context=context
        )
    return http.client.HTTPConnection(order["host"], order["port"], timeout=TIMEOUT_S)


def post(client: http.client.HTTPConnection, order: dict[str, Any]) -> tuple[int, Any]:
    """One completion over an open connection."""
    headers = {"Content-Type": "application/json", **order.get("headers", {})}
    client.request("POST", "/v1/completions", json.dumps(order["body"]), headers)
    response = client.getresponse()
    return response.status, json.loads(response.read())


def complete(order: dict[str, Any]) -> Any:
    """A completion over HTTP."""
    started = time.monotonic()
    status, body = post(connection(order), order)
    return {"status": status, "body": body, "seconds": time.monotonic() - started}


def channel(order: dict[str, Any]) -> grpc.Channel:
    """In plaintext, or with whatever certificates the order has."""
    options = [("grpc.ssl_target_name_override", order["name"])] if "name" in order else []
    if "ca" not in order:
        return grpc.insecure_channel(order["target"], options)
    credentials = grpc.ssl_channel_credentials(
        order["ca"].encode(),
        order["key"].encode() if "key" in order else None,
        order["certificate"].encode() if "certificate" in order else None,
    )
    return grpc.secure_channel(order["target"], credentials, options)


def generate(order: dict[str, Any]) -> Any:
    """A generation over gRPC."""
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(text=order["prompt"]),
        options=inference_pb2.GenerationOptions(return_token_ids=True, **order["options"]),
    )
    metadata = tuple(order.get("metadata", {}).items())
    stub = inference_pb2_grpc.InferenceServiceStub(channel(order))
    try:
        response = stub.Generate(request, timeout=TIMEOUT_S, metadata=metadata)
    except grpc.RpcError as error:
        return {"code": error.code().name}
    choice = response.choices[0]
    return {"code": "OK", "text": choice.text, "token_ids": list(choice.token_ids)}


def describe_worker(order: dict[str, Any]) -> Any:
    """What a worker says to whoever asks; the scheduler alone may."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel(order))
    return code_of(lambda: stub.Describe(worker_pb2.DescribeRequest(), timeout=5))


def connect_scheduler(order: dict[str, Any]) -> Any:
    """What a scheduler says to whoever connects; frontends alone may."""
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel(order))
    hello = scheduler_pb2.ConnectRequest(cancellation=scheduler_pb2.Cancellation(request_id="x"))

    def messages() -> Any:
        yield hello
        time.sleep(5)

    return code_of(lambda: next(stub.Connect(messages(), timeout=5)))


def code_of(call: Any) -> dict[str, str]:
    """The status of a call, and why."""
    try:
        call()
    except grpc.RpcError as error:
        return {"code": error.code().name, "details": str(error.details())}
    return {"code": "OK", "details": ""}


def load(order: dict[str, Any]) -> Any:
    """Clients that ask one thing after the other, each on a connection that it keeps."""
    end = time.monotonic() + order["seconds"]
    outcomes: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=ask_again_and_again, args=(order, end, outcomes))
        for _ in range(order["clients"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def ask_again_and_again(order: dict[str, Any], end: float, outcomes: list[dict[str, Any]]) -> None:
    """One client; notes what became of each request, and when."""
    client = connection(order)
    while time.monotonic() < end:
        started = time.time()
        outcome: dict[str, Any] = {}
        try:
            status, body = post(client, order)
            outcome = {"status": status, "error": body.get("error"), "usage": body.get("usage")}
        except (OSError, http.client.HTTPException) as error:
            client.close()
            outcome = {"status": 0, "error": f"{type(error).__name__}: {error}"}
        outcomes.append({"started": started, "ended": time.time(), **outcome})
        if outcome["status"] != 200:
            time.sleep(0.2)


COMMANDS = {
    "complete": complete,
    "generate": generate,
    "describe_worker": describe_worker,
    "connect_scheduler": connect_scheduler,
    "load": load,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(COMMANDS[sys.argv[1]](json.loads(sys.argv[2]))) + "\n")
