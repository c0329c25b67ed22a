"""The keys and values that an earlier leader has left in the memories of its workers.

A new leader knows no ended pipelines. It has the tokens of requests from the frontends, but does
not know which blocks of the workers' memory hold the keys and values of these tokens. So each plan
tells the first rank of the first stage which full blocks have entered or left the prefix cache, and
when the stages join the first epoch of a new leader, this rank says which blocks it knows. The new
leader enters into its prefix cache the blocks that are complete on all ranks. Keys and values are
used only if all these conditions hold:

- The last epoch in which each rank has written is the epoch whose blocks the first rank knows.
- No rank has begun an iteration that the first rank has not begun. Such an iteration may have
  written to blocks that the first rank does not know to have left the cache.
- No rank has failed by itself or had results that are not finite.
- Each rank is still the process that wrote the keys and values. If a process was replaced, only the
  earlier leader knew whether it had failed by itself and may have damaged its keys and values.
- The list of blocks is well formed: its columns have equal lengths, no block and no key is in it
  twice, and the secret has the right length.

Blocks are known by digests, which the earlier leader has keyed with a secret. The new leader keys
its own digests with the same secret, so that its requests find the blocks.
"""

from collections.abc import Iterator

from orcinus.v1 import worker_pb2

from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.memory.prefix_cache import OWN_SECRET, SECRET_BYTES
from services.scheduler.pipeline.joining import StoredKV
from services.scheduler.pipeline.membership import Pipeline


class InheritedKV:
    """Restores the prefix caches of an earlier leader."""

    def __init__(self) -> None:
        self._known: set[str] = set()  # the processes of workers that have served this leader
        self._secret = OWN_SECRET

    def is_wanted(self, pipeline: Pipeline) -> bool:
        """Returns whether the workers of a pipeline may have keys and values that this leader does
        not know."""
        return self._known.isdisjoint(pipeline.processes)

    def begin(
        self,
        pipeline: Pipeline,
        stored_kv: StoredKV,
        kept_blocks: worker_pb2.KeptBlocks,
        kv_manager: KVManager,
    ) -> tuple[int, int] | None:
        """Fills the prefix cache of a pipeline that begins an epoch. If the pipeline's workers have
        keys and values of an earlier leader, restores that leader's cache, and returns the epoch
        and the iteration up to which the keys and values are complete. Otherwise leaves the cache
        empty, and returns None."""
        is_first = not self._known
        complete = complete_until(stored_kv, kept_blocks)
        if complete is not None and (is_first or kept_blocks.secret == self._secret):
            self._secret = kept_blocks.secret
        else:
            complete = None
        # All caches of a leader have the same secret, since a request has one list of keys.
        entries = () if complete is None else _entries(kept_blocks, complete[1])
        kv_manager.blocks.restore(entries, secret=self._secret)
        self._known.update(pipeline.processes)
        return complete


def complete_until(
    stored_kv: StoredKV, kept_blocks: worker_pb2.KeptBlocks
) -> tuple[int, int] | None:
    """Returns the epoch of `kept_blocks` and the last of its iterations that is complete in the
    memories of all ranks. Returns None if the keys and values of that epoch are in doubt."""
    ranks = [stored for stage in stored_kv for stored in stage]
    if not (_is_well_formed(kept_blocks) and ranks and all(stored_kv)):
        return None
    is_certain = all(
        it.epoch == kept_blocks.epoch and 0 < it.begun_iteration <= kept_blocks.last_iteration
        for it in ranks
    )
    return (kept_blocks.epoch, min(it.iteration for it in ranks)) if is_certain else None


def _is_well_formed(kept_blocks: worker_pb2.KeptBlocks) -> bool:
    """Returns whether a list of blocks can be restored into a prefix cache. Returns False for an
    empty message, which has no secret."""
    block_ids, keys = kept_blocks.block_id, kept_blocks.key
    sizes = {len(block_ids), len(set(block_ids)), len(keys), len(set(keys))}
    return len(kept_blocks.secret) == SECRET_BYTES and sizes == {len(kept_blocks.iteration)}


def _entries(kept_blocks: worker_pb2.KeptBlocks, complete: int) -> Iterator[tuple[int, bytes]]:
    """Yields the ids and keys of the blocks that were complete after the iteration `complete`."""
    columns = zip(kept_blocks.block_id, kept_blocks.key, kept_blocks.iteration, strict=True)
    return ((block_id, key) for block_id, key, iteration in columns if iteration <= complete)
