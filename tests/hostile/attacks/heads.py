"""Attacks with request heads that never end, by clients without a key (item 2)."""

import itertools
from collections.abc import Iterator

from services.frontend.request.refusals import Refusal
from tests.hostile.attack import Answers, Attack
from tests.hostile.attacks.raw_http import all_of, exchange
from tests.hostile.target import Target

TOO_LARGE = frozenset({"431", "414", "400", "closed"})


async def many_headers(target: Target) -> Answers:
    """Sends 160,000 headers on each of 50 connections."""
    lines = "".join(f"x-{index}: a\r\n" for index in range(160_000))
    request = f"GET /health HTTP/1.1\r\nhost: {target.http}\r\n{lines}\r\n".encode()
    return await all_of(exchange(target, request) for _ in range(50))


async def growing_header(target: Target) -> Answers:
    """Sends one header whose value has 128 MB, in pieces of 64 KiB."""
    start = f"GET /health HTTP/1.1\r\nhost: {target.http}\r\nx-long: ".encode()

    def parts() -> Iterator[bytes]:
        yield start
        yield from itertools.repeat(b"a" * 2**16, 2048)
        yield b"\r\n\r\n"

    return await all_of([exchange(target, *parts())])


async def many_growing_headers(target: Target) -> Answers:
    """Sends one header that does not end on each of 40 connections, a kilobyte at a time."""
    start = f"GET /health HTTP/1.1\r\nhost: {target.http}\r\nx-long: ".encode()
    parts = [start, *[b"a" * 1024] * 4096]
    return await all_of(exchange(target, *parts) for _ in range(40))


async def long_urls(target: Target) -> Answers:
    """Asks for 20 paths of 4 MB."""
    request = f"GET /{'a' * 4 * 10**6} HTTP/1.1\r\nhost: {target.http}\r\n\r\n".encode()
    return await all_of(exchange(target, request) for _ in range(20))


async def long_trailers(target: Target) -> Answers:
    """Ends a chunked body with 160,000 trailers, on each of 10 connections."""
    trailers = "".join(f"x-{index}: a\r\n" for index in range(160_000))
    request = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {target.http}\r\n"
        f"transfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n{trailers}\r\n"
    ).encode()
    return await all_of(exchange(target, request) for _ in range(10))


async def long_chunk_extensions(target: Target) -> Answers:
    """Sends chunks of one byte with extensions of 64 KiB, on each of 10 connections."""
    start = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {target.http}\r\n"
        f"transfer-encoding: chunked\r\n\r\n"
    ).encode()
    chunk = b"1;" + b"a" * 2**16 + b"\r\n \r\n"
    return await all_of(
        exchange(target, start, *[chunk] * 64, b"2\r\n{}\r\n0\r\n\r\n") for _ in range(10)
    )


LARGE = frozenset({Refusal.HEAD_TOO_LARGE})

ATTACKS = (
    Attack(name="many_headers", run=many_headers, answers=TOO_LARGE, refusals=LARGE),
    Attack(name="growing_header", run=growing_header, answers=TOO_LARGE, refusals=LARGE),
    Attack(
        name="many_growing_headers", run=many_growing_headers, answers=TOO_LARGE, refusals=LARGE
    ),
    Attack(name="long_urls", run=long_urls, answers=TOO_LARGE, refusals=LARGE),
    Attack(
        name="long_trailers",
        run=long_trailers,
        answers=TOO_LARGE | {"413"},
    ),
    Attack(name="long_chunk_extensions", run=long_chunk_extensions),
)
