"""The blocks that the scheduler's prefix cache has, according to the plans of an epoch.

The first rank of the first stage keeps this record for a new leader, which knows nothing of the
leader before, and does not use the record itself. A rank learns of a change when it begins the
iteration of the plan, so before the iteration writes to a block that has left the cache.
"""

from orcinus.v1 import worker_pb2


class KeptBlocks:
    """The full blocks of one epoch that hold known beginnings of sequences."""

    def __init__(self) -> None:
        self._epoch = 0
        self._last_iteration = 0
        self._secret = b""
        self._entries: dict[int, tuple[bytes, int]] = {}  # key and iteration, by block id

    def begin(self, plan: worker_pb2.RunIterationsRequest) -> None:
        """Notes the changes that come with a plan whose iteration begins now. The first plan of
        another epoch replaces everything."""
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
