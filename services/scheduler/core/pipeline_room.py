"""The load of one pipeline, and its room for further requests, for placement (`placement.py`)."""

from services.scheduler.core.memory.kv_manager import KVManager
from services.scheduler.core.request import Request
from services.scheduler.core.request_pool import RequestPool


class PipelineRoom:
    """A `Room` that is computed from the requests and the memory of one pipeline."""

    def __init__(self, pool: RequestPool, kv_manager: KVManager, max_running: int) -> None:
        """`max_running` is the largest number of requests that may be in the batches in flight."""
        self._pool = pool
        self._kv_manager = kv_manager
        self._max_running = max_running

    @property
    def n_running(self) -> int:
        """Number of requests that the pipeline has admitted and that have not ended."""
        return self._pool.n_running

    @property
    def n_prompt_tokens_left(self) -> int:
        """Number of prompt tokens of admitted requests that were in no batch yet."""
        return self._pool.prefills.n_tokens

    @property
    def build(self) -> str:
        """Name of the build of the pipeline's workers."""
        return self._pool.build

    def fits_ever(self, request: Request) -> bool:
        """Returns whether the empty memory of the pipeline has room for a request."""
        return self._kv_manager.fits_ever(request.max_sequence_len)

    @property
    def n_places(self) -> int:
        """Number of further requests that the pipeline could admit now, if its memory has room for
        them."""
        kv_manager = self._kv_manager
        if self._pool.is_late or kv_manager.is_owing or not kv_manager.rows.has_free:
            return 0
        return max(0, self._max_running - self._pool.n_running)

    def takes(self, request: Request, *, n_more_blocks: int = 0) -> bool:
        """Returns whether the pipeline could admit a request in addition to other requests that
        need `n_more_blocks` blocks. Call this only if `n_places` is larger than the number of the
        other requests. The order checks the limits of the request's client as if the other requests
        did not run. The result may be False too often: it counts all blocks of the request, even if
        the request could share cached blocks that running requests use."""
        kv_manager = self._kv_manager
        if not self._pool.gates.passes(request):
            return False
        if self._pool.has_trials and not request.needs_trial:
            return False  # suspects on trial come first
        n_blocks = n_more_blocks + self.n_blocks_for(request)
        if kv_manager.n_reserved_blocks + n_blocks > kv_manager.n_blocks:
            return False
        return self._pool.order.may_begin(request, self._pool.running)

    def n_blocks_for(self, request: Request) -> int:
        """Returns how many blocks the pipeline would reserve for a request if its prefix cache had
        no tokens of the request."""
        return self._kv_manager.n_blocks_to_admit(request)

    def n_uncached_tokens(self, request: Request) -> int:
        """Returns how many tokens of a request are not in the prefix cache of the pipeline."""
        n_cached = self._kv_manager.n_cached_columns(request) * self._kv_manager.block_size
        return request.n_tokens - n_cached

    def wake(self) -> None:
        """Makes the pipeline select again, if it may send a batch."""
        self._pool.wake()
