"""Limits the entries of all prefix caches in this process, and divides the limit among pipelines.

Each pipeline has a prefix cache of its own. The entries take memory of the scheduler's process,
however many pipelines there are, so all caches together have at most `MAX_BLOCKS` entries. Each
cache may have an equal part of this number.
"""

from collections.abc import Hashable

from services.scheduler.core.memory.blocks import Blocks
from services.scheduler.core.memory.prefix_cache import MAX_BLOCKS


class CacheRoom:
    """Limits the number of blocks in the prefix caches of all pipelines that serve. Each pipeline
    has an equal part."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._open: dict[Hashable, Blocks] = {}  # by pipeline

    def open(self, pipeline: Hashable, blocks: Blocks) -> None:
        """Adds the cache of a pipeline, and limits each cache to its new equal part of the entries.
        Blocks beyond the limit of a cache are evicted, except those that requests use."""
        self._open[pipeline] = blocks
        self._share_out()

    def close(self, pipeline: Hashable) -> None:
        """Removes the cache of a pipeline that no longer serves. The other caches may then have
        more entries."""
        self._open.pop(pipeline, None)
        self._share_out()

    def _share_out(self) -> None:
        for blocks in self._open.values():
            blocks.limit_cache(max(1, self._max_blocks // len(self._open)))
