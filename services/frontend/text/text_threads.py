"""Threads in which texts are tokenized and conversations are rendered.

Work on a very short text takes less time than a switch to a thread, so the event loop does it at
once. Other work waits for one of two lanes. A lane is a thread with a queue. One of the two lanes
is for short texts, so that these do not wait behind long ones. A lane does one piece of work at a
time, in order of arrival. It refuses new work when too many characters wait.

A thread cannot be stopped. So the memory of the work is counted until the work ends, even if the
client has disconnected before. If the work has not begun when its client disconnects, it is not
done.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.common import errors
from services.frontend.request.memory_budget import Share
from services.frontend.request.refusals import Refusal, Refusals

INLINE_CHARACTERS = 8192
"""Largest number of characters of a text on which the event loop itself works, for a few
milliseconds."""

SHORT_CHARACTERS = 32 * 1024
"""Largest number of characters of a text in the lane for short texts. Such a text takes about 20
ms."""

MAX_WAITING_CHARACTERS = 2 * 2**20
"""Largest number of characters of all texts that wait for one lane: a few seconds of work. A single
text may wait even if it is longer."""

ENCODE_BYTES = 160
"""Bytes of memory that the tokenizers library takes while it works, for each character of a text,
plus as much for each byte of the text in UTF-8. Measured: 130 for each letter of English, 305 for
single letters between signs, 450 for each character of Chinese, 600 to 700 for emoji."""

LANE_PART = 4
"""A piece of work in a lane is counted with at most 1 / `LANE_PART` of the memory budget. Otherwise
one long text could keep all other requests out. Memory that is not counted for this reason is
bounded by `max_prompt_characters`, once for each lane."""

Result = TypeVar("Result")


def encode_bytes(text: str) -> int:
    """Returns an upper bound, in bytes, on the memory that tokenizing a text takes."""
    n_utf8 = len(text) if text.isascii() else len(text.encode(errors="replace"))
    return ENCODE_BYTES * (len(text) + n_utf8)


class TextThreads:
    """Runs work on texts in two lanes (threads with a queue each): one for short texts, and one for
    long texts."""

    def __init__(self, refusals: Refusals) -> None:
        self._short = TextLane("short-texts", refusals)
        self._long = TextLane("long-texts", refusals)

    async def run(
        self,
        work: Callable[[], Result],
        share: Share,
        *,
        n_characters: int,
        n_bytes: int,
        is_short: bool,
    ) -> Result:
        """Calls `work`, which handles `n_characters` characters, in a thread. Returns its result,
        or raises its error. The work takes `n_bytes` bytes of memory, which are added to the call's
        share of the budget until the work ends.

        Raises:
            PoolFull: too many characters wait, or the budget has too little memory left.
        """
        lane = self._short if is_short else self._long
        return await lane.run(work, share, n_characters=n_characters, n_bytes=n_bytes)


class TextLane:
    """A thread that does one piece of work at a time, with a queue of the work that waits for
    it."""

    def __init__(self, name: str, refusals: Refusals) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._refusals = refusals
        self._turn = asyncio.Lock()  # fair: given in order of arrival
        self._n_waiting = 0  # characters of waiting texts

    async def run(
        self, work: Callable[[], Result], share: Share, *, n_characters: int, n_bytes: int
    ) -> Result:
        """Calls `work` in this lane's thread, after all work that was given to the lane earlier.
        `TextThreads.run` explains the arguments."""
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
                done.exception()  # marks it as seen: the caller may be gone
            part.close()
            self._turn.release()

        working.add_done_callback(end)
        return await asyncio.shield(working)

    async def _wait_turn(self, n_characters: int) -> None:
        if self._n_waiting and self._n_waiting + n_characters > MAX_WAITING_CHARACTERS:
            self._refusals[Refusal.IN_FLIGHT] += 1
            raise errors.PoolFull("too many long texts at once; try again")
        self._n_waiting += n_characters
        try:
            await self._turn.acquire()
        finally:
            self._n_waiting -= n_characters
