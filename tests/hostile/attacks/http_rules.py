"""Requests that are strange by the rules of HTTP, or made to be echoed (item 8)."""

import asyncio
from collections import Counter

from services.frontend.request.refusals import Refusal
from tests.hostile.attack import Answers, Attack
from tests.hostile.attacks.raw_http import CHAT, COMPLETIONS, all_of, exchange, post
from tests.hostile.target import Target

N_PIPELINED = 20_000
MAX_ECHO_BYTES = 2**13


async def pipelined_requests(target: Target) -> Answers:
    """Sends 20,000 requests on one connection at once, and does not wait for answers."""
    request = f"GET /health HTTP/1.1\r\nhost: {target.http}\r\n\r\n".encode()
    reader, writer = await target.connect()
    n_answers, sending = 0, asyncio.create_task(_write(writer, request * N_PIPELINED))
    try:
        async with asyncio.timeout(10):
            while piece := await reader.read(2**16):
                n_answers += piece.count(b"HTTP/1.1 200")
                if n_answers == N_PIPELINED:
                    break
    except (OSError, TimeoutError):
        pass
    finally:
        sending.cancel()
        writer.transport.abort()
    return Counter({"200": n_answers})


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def echoed_model(target: Target) -> Answers:
    """Asks for a model with a name of 7 MB, to have it sent back."""
    body = {"model": "m" * 7 * 10**6, "prompt": "a"}
    return Counter([await _size(target, post(target, COMPLETIONS, body))])


async def echoed_role(target: Target) -> Answers:
    """Writes a conversation of a role of 7 MB, to have it sent back."""
    body = {"messages": [{"role": "r" * 7 * 10**6, "content": "a"}]}
    return Counter([await _size(target, post(target, CHAT, body))])


async def echoed_field(target: Target) -> Answers:
    """Sends unknown fields with names of 7 MB in all, which the server might repeat in its
    answer."""
    body = {"prompt": "a", **{f"{index:06}{'f' * 994}": 1 for index in range(7000)}}
    return Counter([await _size(target, post(target, COMPLETIONS, body))])


async def _size(target: Target, request: bytes) -> str:
    """Returns the status of an answer, or `echo` where it has more than a few bytes."""
    reader, writer = await target.connect()

    async def read() -> bytes:
        answer = await reader.read(2**16)
        while b"\r\n\r\n" not in answer and answer:
            answer += await reader.read(2**16)
        length = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        rest = int(length or 0) - len(answer.partition(b"\r\n\r\n")[2])
        return answer + (await reader.readexactly(rest) if rest > 0 else b"")

    sending = asyncio.create_task(_write(writer, request))
    try:
        async with asyncio.timeout(40):
            answer = await read()
    except (OSError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        sending.cancel()
        writer.transport.abort()
    return answer.split()[1].decode() if len(answer) < MAX_ECHO_BYTES else "echo"


async def upgrade_with_a_body(target: Target) -> Answers:
    """Asks for an upgrade to HTTP/2 in a request with a body, as Java's client does."""
    more = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    body = {"prompt": [7, 8, 9], "max_tokens": 2}
    return Counter([await exchange(target, post(target, COMPLETIONS, body, more=more))])


async def http_1_0(target: Target) -> Answers:
    """Asks for a stream as a client of HTTP/1.0, which knows no chunks."""
    body = {"prompt": [7, 8, 9], "max_tokens": 4, "stream": True}
    request = post(target, COMPLETIONS, body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    reader, writer = await target.connect()
    try:
        writer.write(request)
        async with asyncio.timeout(20):
            answer = await reader.read(-1)
    finally:
        writer.transport.abort()
    is_chunked = b"transfer-encoding" in answer.lower()
    return Counter(["chunked" if is_chunked else answer.split()[1].decode()])


async def hosts(target: Target) -> Answers:
    """Names no host, and two."""
    none = b"GET /health HTTP/1.1\r\n\r\n"
    two = b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n"
    return await all_of(exchange(target, request) for request in (none, two))


async def never_fits(target: Target) -> Answers:
    """Sends prompts that can never fit: more tokens than the model reads, and prompts that take
    more memory than there is."""
    bodies = [
        {"prompt": [7] * 5000},
        {"prompt": "a b " * 25_000},
        {"prompt": [[7] * 1000] * 2000, "n": 128},
        {"prompt": [[7] * 1000] * 64, "n": 128},
    ]
    return await all_of(exchange(target, post(target, COMPLETIONS, body)) for body in bodies)


REJECTED = frozenset({"400", "404", "413"})

ATTACKS = (
    Attack(name="pipelined_requests", run=pipelined_requests),
    Attack(name="echoed_model", run=echoed_model, answers=REJECTED),
    Attack(name="echoed_role", run=echoed_role, answers=REJECTED),
    Attack(name="echoed_field", run=echoed_field, answers=REJECTED | {"200"}),
    Attack(name="upgrade_with_a_body", run=upgrade_with_a_body, answers=frozenset({"200"})),
    Attack(name="http_1_0", run=http_1_0, answers=frozenset({"200"})),
    Attack(
        name="hosts",
        run=hosts,
        answers=frozenset({"400"}),
        refusals=frozenset({Refusal.MALFORMED}),
    ),
    Attack(name="never_fits", run=never_fits, answers=REJECTED),
)
