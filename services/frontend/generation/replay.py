"""Replays an answer when a broken stream is resumed: the tokens that the client already has are
processed again.

The text of these tokens is not sent again. Afterwards the answer is in the state that it had when
the stream broke, including the text that was held back, the stop strings that had begun, and
whether the answer had ended.
"""

import asyncio
import time
from collections.abc import Sequence

from services.common.errors import InvalidRequest
from services.frontend.generation.answer import Answer, Piece
from services.frontend.request.finish_reason import FinishReason
from services.frontend.request.resumption import TOKENS_FIELD
from services.frontend.text.message_reader import MessageReader

REPLAYED_TOKENS, REPLAY_S = 64, 0.001
"""Replaying pauses for other tasks after this many tokens, or after this many seconds. The limit in
seconds is needed because stop strings can make tokens slow to process."""


async def replay(
    answer: Answer,
    token_ids: Sequence[int],
    *,
    ending: FinishReason | None,
    reader: MessageReader,
) -> Piece:
    """Brings an answer and the reader of its text into the state after `token_ids`, the tokens that
    the client has. Returns the last piece of the answer if the answer ends there, else an empty
    piece. `ending` is the reason why the answer ended there, or None if the answer continues. If a
    stop string ended the answer, `ending` is None, because replaying finds the stop string.

    Raises:
        InvalidRequest: a stop string would have ended the answer before the last of these tokens.
    """
    pause_at = time.perf_counter() + REPLAY_S
    for number, token_id in enumerate(token_ids, start=1):
        reader.feed(answer.add((token_id,)).text)
        if answer.is_finished:
            break
        if number % REPLAYED_TOKENS == 0 or time.perf_counter() > pause_at:
            await asyncio.sleep(0)
            pause_at = time.perf_counter() + REPLAY_S
    if answer.n_tokens < len(token_ids):
        raise InvalidRequest(TOKENS_FIELD, "has tokens after those of a stop string")
    if answer.is_finished:
        return Piece(answer.index, finish_reason=FinishReason.STOP)
    return Piece(answer.index) if ending is None else answer.finish(ending)
