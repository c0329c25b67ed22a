"""Starts a local system for one command: runs `services.local` on free ports, and stops it when the
command ends."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from services.common.process import die_with_parent

READY = re.compile(r"Orcinus serves .*: OpenAI (https?://\S+)/v1  gRPC (\S+)")
"""Pattern of the line in which `services.local` prints the addresses at which it serves."""
START_LIMIT_S = 1800.0
"""Seconds after which a system that has not started to serve is killed."""
STOP_LIMIT_S = 30.0


class DoesNotServe(Exception):
    """The system ended, or did not serve in time. The reason has been written to standard error."""


@dataclass(frozen=True, slots=True)
class LocalAddresses:
    """The addresses of a local system."""

    url: str
    """URL of the HTTP API."""
    grpc: str
    """Address of the gRPC API, host:port."""


@contextmanager
def serving(options: Sequence[str]) -> Iterator[LocalAddresses]:
    """Starts `services.local` with the given options, and yields the addresses of its APIs. The
    system is stopped at the end of the `with` block.

    No process of the system survives this process, even if this process is killed.

    Raises:
        DoesNotServe: the system ended before it served, or did not serve in time.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "services.local",
            "--http-port=0",
            "--grpc-port=0",
            "--log-level=ERROR",
            "--spares=0",
            *options,
        ],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C reaches only this process, which then stops the child
        preexec_fn=die_with_parent,
    )
    timer = threading.Timer(START_LIMIT_S, process.kill)
    timer.daemon = True
    timer.start()
    try:
        addresses = _addresses_of(process)
        timer.cancel()
        yield addresses
    finally:
        timer.cancel()
        _stop(process)


def _addresses_of(process: "subprocess.Popen[str]") -> LocalAddresses:
    if process.stdout is None:
        raise ValueError("its output is no pipe")
    for line in process.stdout:
        if found := READY.match(line):
            return LocalAddresses(found[1], found[2])
    raise DoesNotServe(f"services.local ended with status {process.wait(STOP_LIMIT_S)}")


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
