"""Connections that are opened and kept, and on which little or nothing comes (item 2)."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator

from services.frontend.request.refusals import Refusal
from tests.hostile.attack import Answers, Attack
from tests.hostile.attacks.raw_http import COMPLETIONS, all_of, exchange, head
from tests.hostile.target import Target

HOLD_S = 8.0
"""Seconds that an attacker waits: more than the limits of the frontend that is attacked here."""
ENDED = frozenset({"408", "429", "503", "closed"})


async def silent_connections(target: Target) -> Answers:
    """Opens 2,000 connections and sends no bytes."""
    return await all_of(exchange(target, limit_s=HOLD_S) for _ in range(2000))


async def silent_grpc_connections(target: Target) -> Answers:
    """Opens 2,000 connections to the gRPC API and sends no bytes."""
    return await _hold(target, target.grpc, 2000)


async def idle_connections(target: Target) -> Answers:
    """Opens 1,500 connections to a frontend that may have 1,024 descriptors."""
    return await _hold(target, target.http, 1500)


async def slow_heads(target: Target) -> Answers:
    """Sends the heads of 500 requests, a byte every half second."""
    request = f"GET /health HTTP/1.1\r\nhost: {target.http}\r\nx-slow: {'a' * 1000}".encode()
    parts = [request[index : index + 1] for index in range(len(request))]
    return await all_of(exchange(target, *parts, pause_s=0.5, limit_s=HOLD_S) for _ in range(500))


async def slow_bodies(target: Target) -> Answers:
    """Sends 100 bodies of 8 MB but for their last bytes, which come one a second."""
    return await all_of(
        exchange(target, *_slow_body(target), pause_s=0.05, limit_s=HOLD_S) for _ in range(100)
    )


async def small_slow_bodies(target: Target) -> Answers:
    """Sends 300 requests whose bodies have a few bytes, at one byte a second."""
    start = head(target, COMPLETIONS, 1000)
    parts = [start, *[b" "] * 1000]
    return await all_of(exchange(target, *parts, pause_s=1.0, limit_s=HOLD_S) for _ in range(300))


def _slow_body(target: Target) -> Iterator[bytes]:
    yield head(target, COMPLETIONS, 8 * 2**20)
    yield from itertools.repeat(b" " * 2**18, 31)
    yield from itertools.repeat(b" ", 1000)


async def _hold(target: Target, address: str, n_connections: int) -> Answers:
    """Opens connections, holds them for some time, and counts the connections that the server has
    closed."""

    async def hold() -> str:
        try:
            reader, writer = await target.connect(address)
        except OSError:
            return "closed"
        try:
            async with asyncio.timeout(HOLD_S):
                while await reader.read(2**16):
                    pass
        except TimeoutError:
            return "open"
        except OSError:
            return "closed"
        finally:
            writer.transport.abort()
        return "closed"

    return Counter(await asyncio.gather(*(hold() for _ in range(n_connections))))


ATTACKS = (
    Attack(
        name="silent_connections",
        run=silent_connections,
        answers=ENDED,
        refusals=frozenset({Refusal.HEAD_TIMEOUT, Refusal.CONNECTIONS}),
    ),
    Attack(name="silent_grpc_connections", run=silent_grpc_connections),
    Attack(
        name="slow_heads",
        run=slow_heads,
        answers=ENDED,
        refusals=frozenset({Refusal.HEAD_TIMEOUT}),
    ),
    Attack(
        name="slow_bodies",
        run=slow_bodies,
        answers=ENDED,
        refusals=frozenset({Refusal.BODY_TIMEOUT, Refusal.MEMORY, Refusal.KEY_IN_FLIGHT}),
    ),
    Attack(
        name="small_slow_bodies",
        run=small_slow_bodies,
        answers=ENDED,
        refusals=frozenset({Refusal.BODY_TIMEOUT}),
    ),
    Attack(name="idle_connections", run=idle_connections, system="few descriptors"),
)
