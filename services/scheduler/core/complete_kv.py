"""The keys and values of a lost pipeline that are complete.

A batch that has returned has written its keys and values on all ranks of all stages: the last stage
samples its tokens after every rank has computed every layer. A batch in flight may have written
all, some or none of its keys and values. It writes only slots from the first position of each span
on, and into no block that the prefix cache had when the batch was selected. So the keys and values
of the returned batches are complete. Here they become entries of the prefix cache, and all other
blocks become free. If the ranks still have their memory in the next epoch, that epoch takes the
cache over, and the requests go on where they were: tokens that were in flight are computed again,
and the same bits are written.
"""

from collections.abc import Collection

from services.scheduler.core.batch import Batch
from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.request import Request


def retire_all(
    running: Collection[Request], in_flight: Collection[Batch], kv_manager: KVManager
) -> None:
    """Releases the reservations of all requests of a pipeline that is lost. The prefix cache keeps
    the tokens whose keys and values are complete. `running` are the admitted requests, and
    `in_flight` the batches that have not returned, the oldest first."""
    starts: dict[Request, int] = {}
    for batch in in_flight:
        for request, start in zip(
            batch.columns.requests, batch.columns.start_positions, strict=True
        ):
            starts.setdefault(request, start)
    for request, start in starts.items():
        kv_manager.forget_from(request, start)
    for request in dict.fromkeys([*running, *starts]):
        if request.reservation is None:
            continue
        request.n_scheduled = min(request.n_scheduled, starts.get(request, request.n_scheduled))
        if request.is_broken:
            kv_manager.discard(request, request.reservation)
        else:
            kv_manager.retire(request, request.reservation)
        request.reservation = None
