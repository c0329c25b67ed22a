"""One client that wants everything (items 6 and 10)."""

import asyncio
from collections import Counter

from services.frontend.request.refusals import Refusal
from tests.hostile.attack import Answers, Attack
from tests.hostile.attacks.raw_http import COMPLETIONS, all_of, exchange, head, post
from tests.hostile.target import Target

HOLD_S = 6.0


async def many_answers(target: Target) -> Answers:
    """Asks in one call for 8 prompts with 127 answers, and reads all that comes."""
    prompts = [[7 + index] * 32 for index in range(8)]
    body = {"prompt": prompts, "n": 127, "max_tokens": 64, "stream": True, "ignore_eos": True}
    request = post(target, COMPLETIONS, body)
    reader, writer = await target.connect()
    answers: Answers = Counter()
    try:
        writer.write(request)
        answers[(await reader.readline()).split()[1].decode()] += 1
        async with asyncio.timeout(HOLD_S):
            while await reader.read(2**16):
                pass
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    return answers


async def many_calls(target: Target) -> Answers:
    """Asks for 2,000 long answers at once, each on a connection of its own."""
    body = {"prompt": [7] * 64, "max_tokens": 900, "ignore_eos": True}
    request = post(target, COMPLETIONS, body)
    return await all_of(exchange(target, request, limit_s=HOLD_S) for _ in range(2000))


async def uploads_under_a_key(target: Target) -> Answers:
    """Uploads 40 bodies of 8 MB under a key that allows two answers, and never ends them."""
    parts = [head(target, COMPLETIONS, 8 * 2**20), *[b" " * 2**18] * 31]
    return await all_of(exchange(target, *parts, limit_s=HOLD_S) for _ in range(40))


ATTACKS = (
    Attack(name="many_answers", run=many_answers),
    Attack(name="many_calls", run=many_calls, may_crowd_out=True),
    Attack(
        name="uploads_under_a_key",
        run=uploads_under_a_key,
        refusals=frozenset({Refusal.MEMORY, Refusal.BODY_TIMEOUT, Refusal.KEY_IN_FLIGHT}),
        system="keys",
    ),
)
