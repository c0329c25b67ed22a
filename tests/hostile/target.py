"""The addresses that attackers and honest clients go to."""

import asyncio
import dataclasses
import json
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Target:
    """A running system, as helpers are told of it."""

    http: str
    """host:port of the OpenAI API."""
    grpc: str
    """host:port of the public gRPC API."""
    scheduler: str
    worker: str
    frontend_pid: int
    api_key: str | None = None

    def to_json(self) -> str:
        """Returns the target as an argument of a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the target that `to_json` has written."""
        return cls(**json.loads(text))

    async def connect(
        self, address: str | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection to `host:port`, to the OpenAI API unless another is named."""
        host, _, port = (address or self.http).rpartition(":")
        return await asyncio.open_connection(host, int(port))

    @property
    def authorization(self) -> str:
        """The header line that shows the key; empty without one."""
        return "" if self.api_key is None else f"authorization: Bearer {self.api_key}\r\n"
