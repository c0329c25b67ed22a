"""A peer as a child process: its adapter runs in an environment of its own and uses `protocol`.

Between runs a peer is stopped (SIGSTOP), so that threads which spin while they wait take no
processor time from the engine that is measured.
"""

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.machine import ROOT
from benchmarks.peers.catalogue import Peer
from benchmarks.records import RequestRecord
from benchmarks.workload import PlannedRequest

LIBRARY_FOLDERS = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"))
STOP_TIMEOUT_S = 20


class PeerFailed(Exception):
    """A peer could not be started, or ended early. Standard error has the peer's output."""


class PeerProcess:
    """A running peer with its model loaded. The process is stopped (SIGSTOP) except during
    `run`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str],
        *,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        """Starts the peer and waits until it is ready.

        Args:
            stop_timeout_s: seconds within which the peer must end when it is closed; then it is
                killed.

        Raises:
            PeerFailed: the peer ended before it was ready.
        """
        self.name = name
        self._stop_timeout_s = stop_timeout_s
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group to be stopped together, and no Ctrl-C from us
        )
        try:
            self.about: dict[str, Any] = self._hear()["ready"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(
        self, requests: Sequence[PlannedRequest]
    ) -> tuple[list[RequestRecord], list[list[int]]]:
        """Runs requests on the peer. Returns the records and the tokens of all requests, in order.

        Raises:
            PeerFailed: the peer ended.
        """
        self._signal(signal.SIGCONT)
        self._say(
            {
                "requests": [
                    {
                        "arrival_s": request.arrival_s,
                        "prompt_token_ids": request.prompt_token_ids,
                        "n_output": request.n_output,
                        "follows": request.follows,
                    }
                    for request in requests
                ]
            }
        )
        answer = self._hear()
        self._signal(signal.SIGSTOP)
        return [RequestRecord(**values) for values in answer["requests"]], answer["token_ids"]

    def encode(self, texts: Sequence[str]) -> tuple[float, list[list[float]]]:
        """Has the peer, which must be an embedding engine, compute the embeddings of texts. Returns
        the seconds that the peer took for all texts, and the embeddings.

        Raises:
            PeerFailed: the peer ended.
        """
        self._signal(signal.SIGCONT)
        self._say({"texts": texts})
        answer = self._hear()
        self._signal(signal.SIGSTOP)
        return answer["seconds"], answer["vectors"]

    def close(self) -> None:
        """Closes the peer's input, so that it ends. Kills the peer if it does not end within the
        timeout."""
        self._signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=self._stop_timeout_s)  # ends its input, so its loop
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise PeerFailed(f"{self.name} ended with status {self._process.wait()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def start(
    peer: Peer, *, venvs: Path, model: Path, dtype: str, threads: int, options: Sequence[str] = ()
) -> PeerProcess:
    """Starts a peer of the catalogue and loads a model.

    Args:
        dtype: `bf16` or `fp32`.
        options: further options of the adapter.

    Raises:
        PeerFailed: the peer is not installed, a library that it needs is missing, or it ended.
    """
    python = peer.python(venvs)
    if not python.exists():
        install = f"python -m benchmarks.peers.install {peer.name}"
        raise PeerFailed(f"{peer.name} is not in {venvs}: {install}")
    command = [str(python), "-m", f"benchmarks.peers.{peer.module}"]
    command += [f"--model={model.resolve()}", f"--dtype={dtype}", f"--threads={threads}"]
    command += [f"--converted={converted_folder(venvs, model, peer)}", *options]
    environment = {
        **os.environ,
        "PYTHONPATH": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": ":".join(str(find_library(peer, venvs, name)) for name in peer.preload),
        **peer.environment,
    }
    return PeerProcess(peer.name, command, environment)


def find_library(peer: Peer, venvs: Path, name: str) -> Path:
    """Returns the path of a library to preload: in the peer's environment, or else on the machine.

    Raises:
        PeerFailed: the library is in neither place.
    """
    for folder in (peer.venv(venvs) / "lib", *LIBRARY_FOLDERS):
        for path in (folder / name, *folder.glob(f"*/{name}")):
            if path.exists():
                return path
    raise PeerFailed(f"{peer.name} needs {name}, and it is not on this machine")


def converted_folder(venvs: Path, model: Path, peer: Peer) -> Path:
    """Returns the folder for a model that is converted to a peer's own format. The folder's name
    changes when the checkpoint changes."""
    digest = hashlib.sha256()
    for path in sorted(model.resolve().glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return venvs / "models" / peer.name / digest.hexdigest()[:16]
