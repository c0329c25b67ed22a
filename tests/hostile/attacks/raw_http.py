"""Raw HTTP/1.1 for attacks: sends any bytes, and reads the status of the answer."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Iterable
from typing import Any

from tests.hostile.attack import Answers
from tests.hostile.target import Target

CHUNK_BYTES = 2**16
ANSWER_LIMIT_S = 40.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def head(target: Target, path: str, n_bytes: int, *, more: str = "") -> bytes:
    """Returns the head of a request with a body of that length."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: {target.http}\r\n{target.authorization}"
        f"content-type: application/json\r\ncontent-length: {n_bytes}\r\n{more}\r\n"
    ).encode()


def post(target: Target, path: str, body: Any, *, more: str = "") -> bytes:
    """Returns a whole request, of an object or of bytes that may be JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(target, path, len(content), more=more) + content


async def exchange(
    target: Target, *parts: bytes, pause_s: float = 0.0, limit_s: float = ANSWER_LIMIT_S
) -> str:
    """Sends bytes, part after part, while it waits for an answer; returns the answer's status,
    `closed` where there was none, or `silent` where none came in time."""
    try:
        reader, writer = await target.connect()
    except OSError:
        return "closed"
    sending = asyncio.create_task(_send(writer, parts, pause_s))
    try:
        async with asyncio.timeout(limit_s):
            line = await reader.readline()
    except TimeoutError:
        return "silent"
    except (OSError, ValueError):
        return "closed"
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        writer.transport.abort()
    return line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"


async def all_of(exchanges: Iterable[Awaitable[str]]) -> Answers:
    """Runs exchanges at once and counts their answers."""
    return Counter(await asyncio.gather(*exchanges))


async def _send(writer: asyncio.StreamWriter, parts: Iterable[bytes], pause_s: float) -> None:
    with contextlib.suppress(OSError):
        for part in parts:
            for start in range(0, len(part), CHUNK_BYTES):
                writer.write(part[start : start + CHUNK_BYTES])
                await writer.drain()
            await asyncio.sleep(pause_s)
