"""The client inside the cluster; `kubectl exec` runs it in a pod of the frontend's image.

    python in_pod.py COMMAND JSON

The program does not import the tests. It prints its answer as one line of JSON. If a service does
not answer, the printed answer says so. Only what the image holds is imported: the standard library,
gRPC and the contracts.
"""

import http.client
import json
import socket
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

CONNECT_TIMEOUT_S = 30
ANSWER_TIMEOUT_S = 200
"""More than a frontend holds a request for which there is no pipeline."""
SILENCE_S = 20
"""Seconds without a byte after which a stream is resumed at another frontend, since the first
frontend may be cut off."""
GIVE_UP_S = 400
"""Seconds without an event of a stream after which it counts as lost."""


def connection(order: dict[str, Any]) -> http.client.HTTPConnection:
    """To the frontend's Service."""
    if "ca" in order:
        context = ssl.create_default_context(cadata=order["ca"])
        return http.client.HTTPSConnection(
            order["host"], order["port"], timeout=CONNECT_TIMEOUT_S, context=context
        )
    return http.client.HTTPConnection(order["host"], order["port"], timeout=CONNECT_TIMEOUT_S)


def post(client: http.client.HTTPConnection, order: dict[str, Any]) -> dict[str, Any]:
    """One completion, over the connection if it is open; status 0 if there was no answer."""
    headers = {"Content-Type": "application/json", **order.get("headers", {})}
    try:
        if client.sock is None:
            client.connect()
        client.sock.settimeout(ANSWER_TIMEOUT_S)
        client.request("POST", "/v1/completions", json.dumps(order["body"]), headers)
        response = client.getresponse()
        return {"status": response.status, "body": json.loads(response.read())}
    except (OSError, http.client.HTTPException, ValueError) as error:
        client.close()
        return {"status": 0, "body": {"error": f"{type(error).__name__}: {error}"}}


def complete(order: dict[str, Any]) -> Any:
    """A completion over HTTP."""
    return post(connection(order), order)


class Stream:
    """A streamed completion, over as many connections as it takes."""

    def __init__(self, order: dict[str, Any], body: dict[str, Any]) -> None:
        self._order = order
        self._body = {**body, "stream": True, "return_token_ids": True}
        self._event_id = ""
        self._seed = 0
        self.token_ids: list[list[int]] = []
        self.finish_reasons: list[str] = []
        self.n_resumed = 0
        self.first_token_s = 0.0
        self.longest_pause_s = 0.0  # the wait for the first token counts, too
        self.longest_gap_s = 0.0  # between two tokens
        self._last_event = time.monotonic()

    def outcome(self) -> dict[str, Any]:
        """Streams to the end. Returns the received tokens with the status 200, or the error."""
        error: str | None = None
        while error is None and not self._read():
            time.sleep(0.2)
            self.n_resumed += bool(self._event_id)
            if time.monotonic() - self._last_event > GIVE_UP_S:
                error = f"nothing for {GIVE_UP_S} s"
        return {
            "status": 200 if error is None else 0,
            "body": {
                "error": error,
                "token_ids": self.token_ids,
                "finish_reasons": self.finish_reasons,
                "n_resumed": self.n_resumed,
                "first_token_s": self.first_token_s,
                "longest_pause_s": self.longest_pause_s,
                "longest_gap_s": self.longest_gap_s,
            },
        }

    def _read(self) -> bool:
        """Reads one response; returns whether it brought the end of the stream."""
        client = connection(self._order)
        body, headers = self._body, {"Content-Type": "application/json"}
        if self._event_id:
            body = {**body, "resumption": {"seed": self._seed, "token_ids": self.token_ids}}
            headers["Last-Event-ID"] = self._event_id
        try:
            client.connect()
            client.sock.settimeout(SILENCE_S)
            client.request("POST", "/v1/completions", json.dumps(body), headers)
            response = client.getresponse()
            event_id = data = ""
            while response.status == 200 and (line := response.readline()):
                text = line.decode().rstrip("\n")
                name, _, value = text.partition(": ")  # no name: a comment
                if name == "id":
                    event_id = value
                elif name == "data":
                    data = value
                elif not text and data == "[DONE]":
                    return True
                elif not text:
                    self._note(event_id, json.loads(data))
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            client.close()
        return False

    def _note(self, event_id: str, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise ValueError(chunk["error"])
        now = time.monotonic()
        pause_s = now - self._last_event
        self.longest_pause_s = max(self.longest_pause_s, pause_s)
        if self._event_id:
            self.longest_gap_s = max(self.longest_gap_s, pause_s)
        else:
            self.first_token_s = pause_s
        self._last_event = now
        self._event_id = event_id
        self._seed = chunk.get("seed", self._seed)
        for choice in chunk["choices"]:
            while len(self.token_ids) <= choice["index"]:
                self.token_ids.append([])
            self.token_ids[choice["index"]] += choice["token_ids"]
            if choice["finish_reason"] is not None:
                self.finish_reasons.append(choice["finish_reason"])


class GrpcStream:
    """A stream over gRPC, as a plain client has it: on one connection, without keepalive."""

    def __init__(self, order: dict[str, Any], body: dict[str, Any]) -> None:
        self._target = f"{order['host']}:{order['port']}"
        self._request = inference_pb2.GenerateStreamRequest(
            prompt=inference_pb2.Prompt(text=body["prompt"]),
            options=inference_pb2.GenerationOptions(return_token_ids=True, **body["options"]),
        )

    def outcome(self) -> dict[str, Any]:
        """Streams to the end. Returns the received tokens with the status 200, or the error."""
        token_ids: list[int] = []
        error: str | None = None
        began = last = time.monotonic()
        first_token_s, longest_pause_s = float(GIVE_UP_S), 0.0
        # After a cut of 25 s, TCP may take another 26 s until it tries again. gRPC's own limit of
        # a minute for the answer to a ping is too close to that on a busy machine.
        own = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.ping_timeout_ms", 180_000)]
        with grpc.insecure_channel(self._target, own) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            try:
                for piece in stub.GenerateStream(self._request, timeout=GIVE_UP_S):
                    token_ids += piece.choice.token_ids
                    now = time.monotonic()
                    first_token_s = min(first_token_s, now - began)
                    longest_pause_s, last = max(longest_pause_s, now - last), now
            except grpc.RpcError as failure:
                error = f"{failure.code().name}: {failure.details()}"
        body = {
            "error": error,
            "token_ids": token_ids,
            "first_token_s": first_token_s,
            "longest_pause_s": longest_pause_s,
        }
        return {"status": 200 if error is None else 0, "body": body}


def channel(order: dict[str, Any]) -> grpc.Channel:
    """Returns a channel, in plaintext or with the certificates that the order names."""
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
        response = stub.Generate(request, timeout=ANSWER_TIMEOUT_S, metadata=metadata)
    except grpc.RpcError as error:
        return {"code": error.code().name}
    choice = response.choices[0]
    return {"code": "OK", "text": choice.text, "token_ids": list(choice.token_ids)}


def describe_worker(order: dict[str, Any]) -> Any:
    """Returns a worker's status for a call of Describe, which only the scheduler may make."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel(order))
    return code_of(lambda: stub.Describe(worker_pb2.DescribeRequest(), timeout=CONNECT_TIMEOUT_S))


def connect_scheduler(order: dict[str, Any]) -> Any:
    """Returns the scheduler's status for a connection, which only frontends may make."""
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel(order))
    hello = scheduler_pb2.ConnectRequest(cancellation=scheduler_pb2.Cancellation(request_id="x"))
    is_answered = threading.Event()

    def messages() -> Any:
        yield hello
        is_answered.wait()

    answer = code_of(lambda: next(stub.Connect(messages(), timeout=CONNECT_TIMEOUT_S)))
    is_answered.set()
    return answer


def code_of(call: Any) -> dict[str, str]:
    """The status of a call, and why."""
    try:
        call()
    except grpc.RpcError as error:
        return {"code": error.code().name, "details": str(error.details())}
    return {"code": "OK", "details": ""}


def load(order: dict[str, Any]) -> Any:
    """Clients that ask one thing after the other, for `seconds` or until standard input ends; says
    so when each of them has been answered. With `streams`, each client streams one of these; with
    `grpc`, over gRPC. Each client pauses for `pause_s` after an answer."""
    address = {**order, "host": address_of(order["host"])}
    is_over = threading.Event()
    clients = [Client(address, is_over, index) for index in range(order["clients"])]
    for client in clients:
        client.start()
    if "seconds" not in order:
        threading.Thread(target=end_with_input, args=(is_over,), daemon=True).start()
    for client in clients:
        client.is_answered.wait()
    say("each client has been answered")
    is_over.wait(order.get("seconds"))
    is_over.set()
    for client in clients:
        client.join()
    return [outcome for client in clients for outcome in client.outcomes]


def address_of(name: str) -> str:
    """Returns the address of a Service. The address does not change, so an outage of the name
    server does not count as a failure."""
    while True:
        try:
            return socket.gethostbyname(name)
        except OSError:
            time.sleep(1)


def end_with_input(is_over: threading.Event) -> None:
    """Sets the event when standard input ends."""
    sys.stdin.read()
    is_over.set()


class Client(threading.Thread):
    """One client with one connection. It records the outcome of each request and its time. The
    client begins its last request when the load is over."""

    def __init__(self, order: dict[str, Any], is_over: threading.Event, index: int) -> None:
        super().__init__()
        self._index = index
        self.outcomes: list[dict[str, Any]] = []
        self.is_answered = threading.Event()
        self._order = order
        self._is_over = is_over

    def run(self) -> None:
        """Asks again and again."""
        client = connection(self._order)
        is_last = False
        while not is_last:
            is_last = self._is_over.is_set()
            started = time.time()
            if "streams" in self._order:
                streams = self._order["streams"]
                kind = GrpcStream if self._order.get("grpc") else Stream
                answer = kind(self._order, streams[self._index % len(streams)]).outcome()
            else:
                answer = post(client, self._order)
            self.outcomes.append(
                {
                    "client": self.name,
                    "index": self._index,
                    "started": started,
                    "ended": time.time(),
                    "status": answer["status"],
                    "error": answer["body"].get("error"),
                    "usage": answer["body"].get("usage"),
                    "stream": answer["body"] if "streams" in self._order else None,
                }
            )
            if answer["status"] == 200:
                self.is_answered.set()
                time.sleep(self._order.get("pause_s", 0))
            else:
                time.sleep(0.2)
        self.is_answered.set()


def say(line: Any) -> None:
    """Prints JSON on a line of its own, at once."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


COMMANDS = {
    "complete": complete,
    "generate": generate,
    "describe_worker": describe_worker,
    "connect_scheduler": connect_scheduler,
    "load": load,
}

if __name__ == "__main__":
    say(COMMANDS[sys.argv[1]](json.loads(sys.argv[2])))
