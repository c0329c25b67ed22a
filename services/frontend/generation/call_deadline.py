"""The time limit of the client call that the current task serves."""

import asyncio
import math
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from services.common import errors
from services.frontend.request.client_call import current_call

Result = TypeVar("Result")


def call_deadline(max_request_s: float) -> float | None:
    """Returns the time at which the call of this task must have ended, by the event loop's clock:
    the client's own deadline, or `max_request_s` seconds after the call began if that is earlier.
    `max_request_s` 0 sets no limit. Returns None if there is no limit."""
    call = current_call()
    wanted = None if call is None else call.deadline()
    if not max_request_s:
        return wanted
    began_at = _now() if call is None else call.began_at
    return min(wanted or math.inf, began_at + max_request_s)


async def by_deadline(deadline: float | None, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`. Cancels `work` and raises TimedOut if `work` has not ended by
    `deadline`, a time of the event loop's clock, or if the deadline is already past. None sets no
    deadline."""
    if deadline is None:
        return await work
    # With a past deadline, `timeout_at` would cancel the work only where the work first waits.
    if _now() < deadline:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                return await work
    work.close()
    raise errors.TimedOut("the request waited longer than it may take", may_retry=False)


def _now() -> float:
    return asyncio.get_running_loop().time()
