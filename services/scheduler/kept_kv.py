"""The keys and values of ended pipelines, which their workers may still have.

When a pipeline ends, its scheduling core knows which blocks of the workers' memory hold which
tokens. A worker keeps the memory from one epoch to the next, and where memory outlives processes,
the process that takes the place of a lost one has it too. So when the stages of the next pipeline
have joined, they report the name of each rank's memory, the epoch that wrote to it last, and the
last iteration that is complete. If these agree with the records of an ended pipeline, the next
pipeline goes on with the keys and values of that pipeline. In any doubt no keys and values are
used, and requests are computed again.

A new leader knows no ended pipelines; `inherited_kv.py` describes what it learns from the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.core.memory.prefix_cache import MAX_BLOCKS
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.pipeline.joining import StoredKV

MAX_ENTRIES = MAX_BLOCKS
"""Largest number of entries of all remembered prefix caches together. Each entry takes memory of
the scheduler. The pipeline that ended last is always remembered."""


@dataclass(frozen=True, slots=True)
class Written:
    """The keys and values that a pipeline has written to the memories of its ranks, in one epoch or
    in several epochs, each of which went on with the blocks of the epoch before."""

    memories: Sequence[bytes]
    """Names of the memories of all ranks, stage by stage. Empty if a memory has no name."""
    complete: tuple[int, int]
    """Number of the last epoch in which an iteration has returned, and number of the last iteration
    that returned in it; 0 if none has returned."""
    last_epoch: int
    """Number of the last epoch in which the pipeline wrote to the memories."""

    def are_in(self, stored_kv: StoredKV) -> bool:
        """Returns whether the memories of the ranks have all keys and values of the iterations that
        have returned, and no other epoch has written to these memories.

        A rank that was killed may not have recorded the last iteration that has returned. Its keys
        and values are complete nevertheless: the ranks of a stage add their results after each
        layer, so no rank can finish an iteration before all ranks have stored its keys and values.
        Only the last iteration can be missing in the record, because a rank records an iteration
        before it begins the next.
        """
        epoch, iteration = self.complete
        return self.memories == names_of(stored_kv) and all(
            (epoch, iteration - 1) <= (stored.epoch, stored.iteration)
            and stored.epoch <= self.last_epoch
            for stage in stored_kv
            for stored in stage
        )


class KeptKV:
    """Remembers the scheduling cores of ended pipelines, each with a record of the keys and values
    that its pipeline has written."""

    def __init__(self) -> None:
        self._ended: list[tuple[Written, Scheduler]] = []  # the latest comes last

    def keep(self, written: Written, scheduler: Scheduler) -> None:
        """Remembers the core of a pipeline that has ended. The core must be suspended. Does nothing
        if the core has no prefix cache, or if a memory of the pipeline has no name."""
        self._forget(written.memories)
        kv_manager = scheduler.kv_manager
        if written.memories and kv_manager.has_prefix_cache and not kv_manager.n_allocated_blocks:
            self._ended.append((written, scheduler))
            while len(self._ended) > 1 and self._n_entries > MAX_ENTRIES:
                del self._ended[0]

    def begin(
        self, epoch: int, stored_kv: StoredKV, scheduler: Scheduler
    ) -> tuple[Written, Scheduler | None]:
        """Begins an epoch with a new scheduling core. Returns the record of the keys and values
        that the epoch goes on with, and the core of the ended pipeline that wrote them. Without
        such a pipeline, returns a record in which no iteration has returned, and None. Forgets the
        cores of all ended pipelines to whose memories the epoch will write."""
        found = [(written, ended) for written, ended in self._ended if written.are_in(stored_kv)]
        memories = names_of(stored_kv)
        self._forget([stored.memory for stage in stored_kv for stored in stage])
        for written, ended in found:
            if scheduler.kv_manager.can_take_over(ended.kv_manager):
                return Written(memories, written.complete, epoch), ended
        return Written(memories, (epoch, 0), epoch), None

    @property
    def _n_entries(self) -> int:
        return sum(len(ended.kv_manager.blocks.cache) for _, ended in self._ended)

    def _forget(self, memories: Sequence[bytes]) -> None:
        self._ended = [
            entry for entry in self._ended if set(entry[0].memories).isdisjoint(memories)
        ]


def names_of(stored_kv: StoredKV) -> Sequence[bytes]:
    """Returns the names of the memories of all ranks, stage by stage. The result is empty if the
    memory of a rank is new in each epoch."""
    if not all(stored_kv):
        return ()
    return tuple(stored.memory for stage in stored_kv for stored in stage)
