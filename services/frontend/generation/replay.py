"""The replay of an answer: the tokens that its client has are read once more.

Nothing of their text is sent. Then the answer is as it was: with the text it held back, the stop
strings it had begun, and its end, if it had come to it.
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
"""Tokens that are read again at a time, and seconds, if stop strings make them take longer; others
come in between."""


async def replay(
    answer: Answer,
    token_ids: Sequence[int],
    *,
    ending: FinishReason | None,
    reader: MessageReader,
) -> Piece:
    """Brings an answer, and the reader of its text, to where the client has them. Returns its last
    piece if that is next, or an empty one. `ending` says why the last token ends the answer, stop
    strings apart, if it does.

    Raises:
        InvalidRequest: a stop string would have ended the answer before.
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
