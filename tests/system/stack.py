"""A running Orcinus, `python -m services.local` in a process of its own, with methods that send it
requests and signals."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from orcinus.v1 import inference_pb2_grpc, watch_pb2, watch_pb2_grpc

from tests.environments import PROXIES
from tests.exposition import Samples
from tests.limits import HANG_S

ROOT = Path(__file__).parents[2]
READY = re.compile(r"Orcinus serves .* OpenAI http://(\S+)/v1  gRPC (\S+)")
METRICS = re.compile(r"Metrics of (.*): (http://\S+)")
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60


class Stack:
    """The processes of one launcher."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = ""
        self.grpc = ""
        self.tree: list[psutil.Process] = []

    def wait_until_ready(self) -> None:
        """Waits until the launcher prints that it serves, and records the addresses that it
        prints."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (line := self._lines.get(timeout=deadline - time.monotonic())) is not None:
            if match := READY.search(line):
                self.http, self.grpc = f"http://{match[1]}", match[2]
                self.look_at_tree()
                return
        raise AssertionError(f"never ready:\n{''.join(self.output)}")

    def look_at_tree(self) -> None:
        """Records the present processes, for example after some of them were restarted."""
        self.tree = psutil.Process(self._process.pid).children(recursive=True)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Waits until the launcher has ended, and returns its exit status."""
        status = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def metrics(self, service: str) -> Samples:
        """Returns the metrics of the service with a name, such as `stage 0`, `scheduler` or
        `frontend`. The stack must have been started with `metrics=True`."""
        return Samples(httpx.get(self.metrics_urls[service]).text)

    @property
    def metrics_urls(self) -> dict[str, str]:
        """The URLs of the services' metrics, by the services' names."""
        return {match[1]: match[2] for line in self.output if (match := METRICS.match(line))}

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the launcher only."""
        self._process.send_signal(number)

    def pids(self, module: str) -> list[int]:
        """Returns the ids of the processes that run a module, ordered by stage."""
        found = []
        for process in self.tree:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                command = process.cmdline()
                if module in command:
                    parent = process.parent()  # of a rank, its controller, which is told its stage
                    above = [] if parent is None else parent.cmdline()
                    found.append((_stage_of([*command, *above]), process.pid))
        return [pid for _, pid in sorted(found)]

    def kill(self, module: str, index: int = 0, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to one of the processes that run a module."""
        os.kill(self.pids(module)[index], number)

    def survivors(self) -> list[psutil.Process]:
        """Waits until all recorded processes have ended, and returns those that have not ended in
        time."""
        _, alive = psutil.wait_procs(self.tree, timeout=HANG_S)
        return alive

    def post(
        self, path: str, body: dict[str, Any], *, timeout_s: float = 60, **options: Any
    ) -> httpx.Response:
        """Sends a POST request over HTTP, and returns the response."""
        return httpx.post(f"{self.http}{path}", json=body, timeout=timeout_s, **options)

    def complete(self, prompt: list[int] | str, **options: Any) -> dict[str, Any]:
        """Returns the first choice of a completion, with its token ids."""
        body = {"prompt": prompt, "return_token_ids": True, **options}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

    @contextlib.contextmanager
    def inference(self) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
        """Yields a stub of the public gRPC API."""
        with grpc.insecure_channel(self.grpc) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    @contextlib.contextmanager
    def iterations(self) -> Iterator["IterationRecords"]:
        """Yields the records of all iterations that start inside the block."""
        with grpc.insecure_channel(self.scheduler_address()) as channel:
            call = watch_pb2_grpc.WatchServiceStub(channel).Watch(watch_pb2.WatchRequest())
            call.initial_metadata()  # comes when the watch has begun
            yield IterationRecords(call)
            call.cancel()

    def stage_addresses(self) -> list[str]:
        """Returns the addresses of the stages' controllers, ordered by stage."""
        return self._option("--stages=").split(",")

    def scheduler_address(self) -> str:
        """Returns the address of the scheduler."""
        return self._option("--scheduler=")

    def _option(self, name: str) -> str:
        for process in self.tree:
            for argument in process.cmdline():
                if argument.startswith(name):
                    return argument.removeprefix(name)
        raise AssertionError(f"nobody was told {name}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)


class IterationRecords:
    """Records of iterations, which a thread collects in the background."""

    def __init__(self, call: Any) -> None:
        self.records: list[watch_pb2.IterationEvent] = []
        self.n_slots = 0
        """Number of K/V slots of the system."""
        self._call = call
        threading.Thread(target=self._collect, daemon=True).start()

    def wait_for(self, is_enough: Any, timeout_s: float = 30) -> None:
        """Waits until the records so far satisfy a condition."""
        deadline = time.monotonic() + timeout_s
        while not is_enough(self.records):
            assert time.monotonic() < deadline, self.records
            time.sleep(0.02)

    def _collect(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in self._call:
                for event in message.events:
                    self._take(event)

    def _take(self, event: watch_pb2.WatchEvent) -> None:
        if event.HasField("epoch"):
            self.n_slots = event.epoch.n_slots
        if event.HasField("iteration"):
            self.records.append(event.iteration)


@contextlib.contextmanager
def serving(
    model: Path,
    *,
    module: str = "services.local",
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Stack]:
    """Yields an Orcinus that serves a model on free ports. Any process that is left at the end is
    killed.

    The environment names proxies that do not answer, and that calls between the services must not
    use. All services end if one of them dies, unless `fail_fast` is False, so that no test
    overlooks it.
    """
    options = {
        "http_port": 0,
        "grpc_port": 0,
        "kv_memory": "16MiB",
        "threads": 1,
        "fail_fast": True,
        "spares": 0,  # stages stay with their workers
        "weight_cache": "off",  # tests leave nothing in the user's cache
        **options,
    }
    arguments = [_argument(name.replace("_", "-"), value) for name, value in options.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", module, f"--model={model}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **PROXIES, **(environment or {})},
    )
    stack = Stack(process)
    try:
        stack.wait_until_ready()
        yield stack
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        process.kill()
        process.wait()
        for child in stack.tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        assert process.stdout is not None
        stack._reader.join(30)
        process.stdout.close()


def _argument(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _stage_of(command: list[str]) -> int:
    text = " ".join(command)
    match = re.search(r"--stage-index=(\d+)", text)
    return int(match[1]) if match else 0
