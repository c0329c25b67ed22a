"""Texts that cost more to make into tokens than to send (item 1), and templates (item 7)."""

import asyncio
import contextlib
from collections import Counter

import grpc
import grpc.aio
from orcinus.v1 import inference_pb2, inference_pb2_grpc

from services.frontend.request.refusals import Refusal
from tests.hostile.attack import Answers, Attack
from tests.hostile.attacks.raw_http import CHAT, COMPLETIONS, all_of, exchange, post
from tests.hostile.target import Target

HUGE_TEXT = "The quick brown fox. " * (8 * 10**6 // 21)
REFUSED = frozenset({"400", "413", "429"})
REFUSED_GRPC = frozenset({"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"})


async def huge_prompt(target: Target) -> Answers:
    """Sends one prompt of 8 MB."""
    return await all_of([exchange(target, post(target, COMPLETIONS, {"prompt": HUGE_TEXT}))])


async def seven_huge_prompts(target: Target) -> Answers:
    """Sends seven prompts of 8 MB at once."""
    request = post(target, COMPLETIONS, {"prompt": HUGE_TEXT})
    return await all_of(exchange(target, request) for _ in range(7))


async def huge_prompts_sent_and_closed(target: Target) -> Answers:
    """Sends 24 prompts of 8 MB and hangs up as soon as each is sent, so that nothing is left that
    counts them."""
    request = post(target, COMPLETIONS, {"prompt": HUGE_TEXT})

    async def send_and_close() -> str:
        with contextlib.suppress(OSError):
            _, writer = await target.connect()
            try:
                writer.write(request)
                async with asyncio.timeout(20):
                    await writer.drain()
                await asyncio.sleep(0.05)
            finally:
                writer.transport.abort()
        return "sent"

    answers = await all_of(send_and_close() for _ in range(24))
    await asyncio.sleep(5)  # for the memory that they take afterwards to be seen
    return answers


async def long_prompts(target: Target) -> Answers:
    """Sends 200 prompts of 9,000 characters, which are too long for the model."""
    request = post(target, COMPLETIONS, {"prompt": HUGE_TEXT[:9000]})
    return await all_of(exchange(target, request) for _ in range(200))


async def tokenize_storm(target: Target) -> Answers:
    """Has 24 texts of 8 MB made into tokens at once over gRPC, which no limit counts."""
    request = inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(text=HUGE_TEXT[:8_000_000]))
    metadata = () if target.api_key is None else (("authorization", f"Bearer {target.api_key}"),)

    async def tokenize(channel: grpc.aio.Channel) -> str:
        try:
            await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(
                request, metadata=metadata, timeout=40
            )
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(target.grpc, [("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(4)
        ]
        return Counter(
            await asyncio.gather(*(tokenize(channel) for channel in channels for _ in range(6)))
        )


async def many_messages(target: Target) -> Answers:
    """Sends conversations of 250,000 messages, which the template goes through one by one."""
    messages = b",".join([b'{"role":"user","content":""}'] * 250_000)
    request = post(target, CHAT, b'{"messages":[%b]}' % messages)
    return await all_of(exchange(target, request) for _ in range(4))


async def huge_messages(target: Target) -> Answers:
    """Sends conversations of one message of 8 MB, which the template writes out."""
    request = post(target, CHAT, {"messages": [{"role": "user", "content": HUGE_TEXT}]})
    return await all_of(exchange(target, request) for _ in range(4))


ATTACKS = (
    Attack(
        name="huge_prompt",
        run=huge_prompt,
        answers=REFUSED,
        refusals=frozenset({Refusal.PROMPT_TOO_LONG}),
    ),
    Attack(
        name="seven_huge_prompts",
        run=seven_huge_prompts,
        answers=REFUSED,
        refusals=frozenset({Refusal.PROMPT_TOO_LONG, Refusal.MEMORY}),
    ),
    Attack(name="huge_prompts_sent_and_closed", run=huge_prompts_sent_and_closed),
    Attack(name="long_prompts", run=long_prompts, answers=REFUSED),
    Attack(
        # gRPC itself refuses messages that are too large, and counts nothing.
        name="tokenize_storm",
        run=tokenize_storm,
        answers=REFUSED_GRPC,
    ),
    Attack(name="many_messages", run=many_messages, answers=REFUSED),
    Attack(
        name="huge_messages",
        run=huge_messages,
        answers=REFUSED,
        refusals=frozenset({Refusal.PROMPT_TOO_LONG, Refusal.MEMORY}),
    ),
)
