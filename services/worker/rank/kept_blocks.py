"""Records which K/V blocks are in the scheduler's prefix cache, according to the plans of an epoch.

The first rank of the first stage keeps this record, because a new leader does not know the prefix
cache of its predecessor and asks the rank for it. The changes that a plan names are recorded when
the plan's iteration begins. So a block that has left the cache is removed from the record before
the iteration writes to it.
"""

from orcinus.v1 import worker_pb2


class KeptBlocks:
    """Keeps the ids of the full blocks in the prefix cache of one epoch, each with the key that
    identifies the block's tokens."""

    def __init__(self) -> None:
        self._epoch = 0
        self._last_iteration = 0
        self._secret = b""
        self._entries: dict[int, tuple[bytes, int]] = {}  # key and iteration, by block id

    def begin(self, plan: worker_pb2.RunIterationsRequest) -> None:
        """Records the changes of the prefix cache that a plan names. Call it when the plan's
        iteration begins. The first plan of another epoch removes all earlier entries."""
        if plan.epoch != self._epoch:
            self._epoch = plan.epoch
            self._entries.clear()
        self._last_iteration = plan.iteration
        if not plan.HasField("cache_changes"):
            return
        changes = plan.cache_changes
        self._secret = changes.secret
        for block_id in changes.left_block_id:
            self._entries.pop(block_id, None)
        for block_id, key in zip(changes.entered_block_id, changes.entered_key, strict=True):
            # Removed first, since a block comes after the blocks before it in its sequence.
            self._entries.pop(block_id, None)
            self._entries[block_id] = key, plan.iteration

    def to_message(self) -> worker_pb2.KeptBlocks | None:
        """Returns the blocks as a message for a leader. Returns None if no iteration has begun."""
        if not self._epoch:
            return None
        return worker_pb2.KeptBlocks(
            epoch=self._epoch,
            last_iteration=self._last_iteration,
            secret=self._secret,
            block_id=self._entries,
            key=[key for key, _ in self._entries.values()],
            iteration=[iteration for _, iteration in self._entries.values()],
        )
