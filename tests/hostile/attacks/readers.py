"""Clients that ask and do not read the answer (items 3 and 5)."""

import asyncio
import contextlib
import socket
from collections import Counter

from orcinus.v1 import inference_pb2, sampling_pb2

from services.frontend.request.refusals import Refusal
from tests.hostile.attack import Answers, Attack
from tests.hostile.attacks import raw_http2
from tests.hostile.attacks.raw_http import COMPLETIONS, post
from tests.hostile.target import Target

HOLD_S = 8.0
STREAM = "/orcinus.v1.InferenceService/GenerateStream"
WATCH = "/grpc.health.v1.Health/Watch"


async def unread_streams(target: Target) -> Answers:
    """Asks for four streams of 8 prompts with 128 answers each, and reads none: 4,096 answers in
    flight for 600 bytes."""
    prompts = [[7 + index] for index in range(8)]
    request = post(target, COMPLETIONS, {"prompt": prompts, "n": 128, "stream": True})
    return await _unread(target, request, 4)


async def unread_long_streams(target: Target) -> Answers:
    """Asks for 200 streams of 900 tokens each, and reads none; sockets hold most of each."""
    body = {"prompt": [7], "max_tokens": 900, "stream": True, "ignore_eos": True}
    return await _unread(target, post(target, COMPLETIONS, body), 200)


async def unread_whole_answers(target: Target) -> Answers:
    """Asks 200 times for an answer that is not streamed, with a prompt that is echoed 128 times,
    and reads none."""
    body = {"prompt": [7] * 900, "max_tokens": 2, "n": 128, "echo": True, "return_token_ids": True}
    return await _unread(target, post(target, COMPLETIONS, body), 200)


async def unread_grpc_streams(target: Target) -> Answers:
    """Asks for 64 streams over gRPC, on connections whose windows let nothing through."""
    request = inference_pb2.GenerateStreamRequest(
        prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[7])),
        options=inference_pb2.GenerationOptions(
            max_tokens=512, n=4, ignore_eos=True, sampling=sampling_pb2.SamplingParams()
        ),
    ).SerializeToString()
    header_block = raw_http2.block(target, STREAM)
    answers: Answers = Counter()
    connections = []
    for _ in range(4):
        connection = await raw_http2.Connection.open(target, initial_window_size=0)
        connections.append(connection)
        for stream in range(1, 33, 2):
            await connection.send(raw_http2.call(stream, header_block, request))
    await asyncio.sleep(HOLD_S)
    for connection in connections:
        answers["reset"] += connection.n_frames[raw_http2.RST_STREAM]
        await connection.close()
    return +answers


async def many_watches(target: Target) -> Answers:
    """Watches the health of the frontend 10,000 times."""
    header_block = raw_http2.block(target, WATCH)
    answers: Answers = Counter()
    connections = []
    with contextlib.suppress(OSError):
        for _ in range(10):
            connection = await raw_http2.Connection.open(target)
            connections.append(connection)
            for stream in range(1, 2001, 2):
                await connection.send(raw_http2.call(stream, header_block, b""))
    await asyncio.sleep(HOLD_S / 2)
    for connection in connections:
        answers["reset"] += connection.n_frames[raw_http2.RST_STREAM]
        answers["closed"] += await connection.is_closed_within(0)
        await connection.close()
    return +answers


async def unread_watches(target: Target) -> Answers:
    """Watches the health of the frontend 100 times without reading, until it hangs up."""
    header_block = raw_http2.block(target, WATCH)
    connection = await raw_http2.Connection.open(target, initial_window_size=0)
    for stream in range(1, 201, 2):
        await connection.send(raw_http2.call(stream, header_block, b""))
    is_closed = await connection.is_closed_within(HOLD_S)
    await connection.close()
    return Counter(["closed" if is_closed else "open"])


async def _unread(target: Target, request: bytes, n_streams: int) -> Answers:
    """Sends a request on each of many connections that take next to nothing, and looks in the end
    which of them the server has closed."""
    host, _, port = target.http.rpartition(":")
    loop = asyncio.get_running_loop()
    sockets = []
    try:
        for _ in range(n_streams):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            sockets.append(connection)
            with contextlib.suppress(OSError):
                await loop.sock_connect(connection, (host, int(port)))
                await loop.sock_sendall(connection, request)
        await asyncio.sleep(HOLD_S)
        return Counter(await asyncio.gather(*map(_state, sockets)))
    finally:
        for connection in sockets:
            connection.close()


async def _state(connection: socket.socket) -> str:
    """Reads and drops received bytes. Returns `closed` if the server has closed the connection,
    otherwise `open`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(2):
            while await loop.sock_recv(connection, 2**16):
                pass
    except TimeoutError:
        return "open"
    except OSError:
        return "closed"
    return "closed"


UNREAD = frozenset({Refusal.UNREAD, Refusal.IN_FLIGHT, Refusal.KEY_IN_FLIGHT, Refusal.MEMORY})

ATTACKS = (
    Attack(name="unread_streams", run=unread_streams),
    Attack(name="unread_long_streams", run=unread_long_streams),
    Attack(
        name="unread_whole_answers", run=unread_whole_answers, refusals=UNREAD, may_crowd_out=True
    ),
    Attack(name="unread_grpc_streams", run=unread_grpc_streams, refusals=UNREAD),
    Attack(name="many_watches", run=many_watches),
    Attack(name="unread_watches", run=unread_watches),
)
