"""Bodies whose structure costs more than their bytes (item 4), over both protocols."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc.aio
from orcinus.v1 import inference_pb2

from services.frontend.request.refusals import Refusal
from tests.hostile.attack import Answers, Attack
from tests.hostile.attacks import raw_http2
from tests.hostile.attacks.raw_http import CHAT, COMPLETIONS, all_of, exchange, post
from tests.hostile.target import Target

GENERATE = "/orcinus.v1.InferenceService/Generate"
N_BYTES = 8_000_000
REFUSED = frozenset({"400", "413", "429"})


def _list(item: bytes) -> bytes:
    """As many items as fit in a body."""
    return b",".join([item] * (N_BYTES // (len(item) + 1)))


def _chat(field: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":"a"}],%b}' % field


def _tools() -> bytes:
    return _chat(b'"tools":[%b]' % _list(b"{}"))


def _metadata() -> bytes:
    keys = (b'"%d":""' % index for index in range(N_BYTES // 12))
    return _chat(b'"metadata":{%b}' % b",".join(keys))


def _parts() -> bytes:
    return b'{"messages":[{"role":"user","content":[%b]}]}' % _list(b'{"type":"text","text":"a"}')


def _logit_bias() -> bytes:
    biases = (b'"%d":1' % index for index in range(N_BYTES // 12))
    return b'{"prompt":"a","logit_bias":{%b}}' % b",".join(biases)


def _token_ids() -> bytes:
    return b'{"prompt":[%b]}' % _list(b"7")


def _stop() -> bytes:
    return b'{"prompt":"a","stop":[%b]}' % _list(b'""')


def _unknown() -> bytes:
    return b'{"prompt":"a",%b}' % b",".join(b'"x%d":[]' % index for index in range(N_BYTES // 13))


def _nested() -> bytes:
    return b'{"prompt":%b}' % (b"[" * (N_BYTES // 2) + b"]" * (N_BYTES // 2))


def _number() -> bytes:
    return b'{"prompt":"a","max_tokens":%b}' % (b"1" * N_BYTES)


def _lists() -> bytes:
    return b'{"prompt":[%b]}' % _list(b"[7]")


def _json_attack(name: str, path: str, body: Callable[[], bytes]) -> Attack:
    async def run(target: Target) -> Answers:
        request = post(target, path, body())
        return await all_of(exchange(target, request) for _ in range(2))

    return Attack(
        name=f"json_{name}",
        run=run,
        answers=REFUSED,
        refusals=frozenset(
            {Refusal.BODY_TOO_LARGE, Refusal.PROMPT_TOO_LONG, Refusal.MEMORY, Refusal.MALFORMED}
        )
        if name not in ("nested", "number")
        else frozenset(),
    )


async def tiny_fields(target: Target) -> Answers:
    """Sends eight messages of 8 MB over gRPC, of fields of two bytes, each an object."""
    # Prompt.conversation.messages, a ChatMessage of no bytes, over and over.
    request = _field(2, _field(3, b"\x0a\x00" * (N_BYTES // 2 - 16)))
    return Counter(await asyncio.gather(*(_generate(target, request) for _ in range(8))))


async def grpc_token_ids(target: Target) -> Answers:
    """Sends eight prompts of 4,000,000 tokens over gRPC."""
    message = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[7] * 4_000_000))
    )
    request = message.SerializeToString()
    return Counter(await asyncio.gather(*(_generate(target, request) for _ in range(8))))


async def _generate(target: Target, request: bytes) -> str:
    """Calls Generate on a connection of its own; returns the status."""
    metadata = () if target.api_key is None else (("authorization", f"Bearer {target.api_key}"),)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target.grpc, options) as channel:
        method: Any = channel.unary_unary(GENERATE)  # bytes in, bytes out
        try:
            await method(request, metadata=metadata, timeout=40)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def slow_messages(target: Target) -> Answers:
    """Sends 60 messages of 7 MB over gRPC that lack their last byte, and waits."""
    header_block = raw_http2.block(target, GENERATE)
    answers: Answers = Counter()
    connections: list[raw_http2.Connection] = []

    async def upload() -> None:
        with contextlib.suppress(OSError):
            connection = await raw_http2.Connection.open(target)
            connections.append(connection)
            await connection.send(
                raw_http2.frame(raw_http2.HEADERS, raw_http2.END_HEADERS, 1, header_block)
                + raw_http2.frame(raw_http2.DATA, 0, 1, b"\0" + (7 * 10**6).to_bytes(4, "big"))
            )
            # A polite client would wait for its window; this one sends what the server says it
            # takes at first, and what a large one would be.
            for _ in range(4):
                await connection.send(raw_http2.frame(raw_http2.DATA, 0, 1, b" " * 2**14))
                await asyncio.sleep(0.05)

    await asyncio.gather(*(upload() for _ in range(60)))
    await asyncio.sleep(6)
    for connection in connections:
        answers["reset"] += connection.n_frames[raw_http2.RST_STREAM]
        await connection.close()
    return +answers


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes of a protobuf message."""
    length, encoded = len(content), bytearray()
    while length >= 128:
        encoded.append(length % 128 + 128)
        length //= 128
    encoded.append(length)
    return bytes((number << 3 | 2,)) + bytes(encoded) + content


REFUSED_GRPC = frozenset({"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})

ATTACKS = (
    _json_attack("tools", CHAT, _tools),
    _json_attack("metadata", CHAT, _metadata),
    _json_attack("parts", CHAT, _parts),
    _json_attack("logit_bias", COMPLETIONS, _logit_bias),
    _json_attack("token_ids", COMPLETIONS, _token_ids),
    _json_attack("stop", COMPLETIONS, _stop),
    _json_attack("unknown", COMPLETIONS, _unknown),
    _json_attack("lists", COMPLETIONS, _lists),
    _json_attack("nested", COMPLETIONS, _nested),
    _json_attack("number", COMPLETIONS, _number),
    Attack(name="grpc_tiny_fields", run=tiny_fields, answers=REFUSED_GRPC),
    Attack(name="grpc_token_ids", run=grpc_token_ids, answers=REFUSED_GRPC),
    Attack(name="grpc_slow_messages", run=slow_messages),
)
