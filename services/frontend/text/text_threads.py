"""The threads in which texts are made into tokens, and conversations into texts.

A short text takes less than a hop to a thread would, and is done at once. Others wait for one of
two lanes, each a thread: what is quickly done does not wait behind what is not. A lane takes one
piece of work at a time, in order of arrival, and refuses more when too much waits.

A thread cannot be stopped. So the memory that its work takes is counted until the work ends, even
if its client has gone meanwhile; work whose client has gone before it began is not begun.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.common import errors
from services.frontend.request.memory_budget import Share
from services.frontend.request.refusals import Refusal, Refusals

INLINE_CHARACTERS = 8192
"""Characters of the longest text that is worked on in the event loop, which takes a few
milliseconds."""

SHORT_CHARACTERS = 32 * 1024
"""Characters of the longest text that is quickly done, in about 20 ms."""

MAX_WAITING_CHARACTERS = 2 * 2**20
"""Characters of the texts that wait for a lane at most: a few seconds of work. One waits in any
case."""

BUSY_RETRY_S = 1.0
"""Seconds after which a client that was refused may try again."""

ENCODE_BYTES = 160
"""Bytes that the tokenizers library takes while it works, for each character of a text and once
more for each of its bytes in UTF-8: 130 for each letter of English, 305 for single letters between
signs, 450 for each character of Chinese, 600 to 700 for emoji."""

LANE_PART = 4
"""A lane's work counts as a quarter of the memory budget at most, so that one long text keeps no
others out. What it takes beyond that is bounded by `max_prompt_characters`, once for each lane."""

Result = TypeVar("Result")


def encode_bytes(text: str) -> int:
    """Returns about how many bytes of memory it takes at most to make tokens of a text."""
    n_utf8 = len(text) if text.isascii() else len(text.encode(errors="replace"))
    return ENCODE_BYTES * (len(text) + n_utf8)


class TextThreads:
    """Both lanes."""

    def __init__(self, refusals: Refusals) -> None:
        self._short = Lane("short-texts", refusals)
        self._long = Lane("long-texts", refusals)

    async def run(
        self,
        work: Callable[[], Result],
        share: Share,
        *,
        n_characters: int,
        n_bytes: int,
        is_short: bool,
    ) -> Result:
        """Does work on so many characters in a thread, and returns its result or raises its error.
        The bytes that it takes are added to the call's share, and are counted until it ends.

        Raises:
            PoolFull: too much waits already, or the bytes are not left.
        """
        lane = self._short if is_short else self._long
        return await lane.run(work, share, n_characters=n_characters, n_bytes=n_bytes)


class Lane:
    """One thread, and the work that waits for it."""

    def __init__(self, name: str, refusals: Refusals) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._refusals = refusals
        self._turn = asyncio.Lock()  # fair: those that wait get it in order of arrival
        self._n_waiting = 0  # characters

    async def run(
        self, work: Callable[[], Result], share: Share, *, n_characters: int, n_bytes: int
    ) -> Result:
        """Does work in the thread when its turn comes, see `TextThreads.run`."""
        n_bytes = min(n_bytes, share.max_bytes // LANE_PART)
        await self._wait_turn(n_characters)
        try:
            share.grow(n_bytes)
        except errors.PoolFull:
            self._turn.release()
            raise
        part = share.split(n_bytes)
        working = asyncio.get_running_loop().run_in_executor(self._thread, work)

        def end(done: asyncio.Future[Result]) -> None:
            if not done.cancelled():
                done.exception()  # nobody may be there any more to whom it would be raised
            part.close()
            self._turn.release()

        working.add_done_callback(end)
        return await asyncio.shield(working)

    async def _wait_turn(self, n_characters: int) -> None:
        if self._n_waiting and self._n_waiting + n_characters > MAX_WAITING_CHARACTERS:
            self._refusals[Refusal.IN_FLIGHT] += 1
            raise errors.PoolFull(
                "too many long texts at once; try again", retry_after_s=BUSY_RETRY_S
            )
        self._n_waiting += n_characters
        try:
            await self._turn.acquire()
        finally:
            self._n_waiting -= n_characters
