"""Settings of a frontend process, from `ORCINUS_*` variables or the command line."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, NonNegativeFloat, PositiveInt, StringConstraints

from services.common.settings import ServiceSettings

MAX_PORT = 65535


def _check_port(address: str) -> str:
    if int(address.rpartition(":")[2]) > MAX_PORT:
        raise ValueError(f"there is no port above {MAX_PORT}")
    return address


Address = Annotated[str, StringConstraints(pattern=r"^\S+:\d{1,5}$"), AfterValidator(_check_port)]
"""`host:port`; port 0 takes a free one where the frontend listens."""


class FrontendSettings(ServiceSettings):
    """Settings of one frontend."""

    model: Path
    """Directory of the checkpoint; only its tokenizer and its chat template are read."""

    scheduler: Address
    """Where the scheduler listens."""

    http_address: Address = "127.0.0.1:8000"
    """Where the OpenAI API listens; this machine only unless told otherwise."""

    grpc_address: Address = "127.0.0.1:50051"
    """Where the gRPC API listens; this machine only unless told otherwise."""

    ready_fd: int | None = None
    """Write end of the launcher's pipe, if a launcher started this process; see `process.py`."""

    max_body_bytes: PositiveInt = 8 * 2**20
    """Largest request in bytes: a million tokens fit, an upload by mistake does not."""

    max_in_flight: PositiveInt = 4096
    """Answers in the making at most: bounds this process's memory."""

    drain_s: NonNegativeFloat = 30.0
    """Seconds that running requests have to finish after a signal to stop."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least important log line to write."""
