"""The gate at which a request waits until the ranks of a pipeline have loaded its adapter.

Ranks hold the adapters that are there from the start, and a bounded number of others. A request
whose adapter they do not hold keeps its place in the order, and requests behind it may be admitted.
One adapter is loaded at a time. Loads that clients ask for take turns with loads that requests wait
for. Clients are served in the order in which they asked, and requests in the order of the pool.

If there is no room, the least recently used adapter without admitted requests is dropped. If all
have admitted requests, the least recently used one is closed: no further requests are admitted for
it until it can be dropped. An adapter for which an earlier request waits is never closed or dropped
for a later request, nor for a load that a client asked for after the request had arrived. So a
request waits for its own adapter and for the ends of running requests, however many requests of
other adapters arrive and however many loads clients ask for.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from services.scheduler.core.request import Request, RequestState

N_LOOKED_AT = 64
"""Only the adapters of this many waiting requests, the first in the order, are considered for
loading. The limit keeps the search short in each iteration."""

MAX_LOSSES = 2
"""A load that a client asked for counts as failed when this many epochs have been lost during it,
because the adapter may be the cause."""

LOADED, FAILED, UNFINISHED = "loaded", "failed", "lost"
LOAD_ENDS = (LOADED, FAILED, UNFINISHED)
"""The ways in which a load ends. `lost`: the epoch was over before the load had ended."""

LOST = "pipelines were lost while they loaded it"

UNLOADED = "model: its adapter was unloaded"


class Entry(Protocol):
    """An adapter that the leader knows by its digest."""

    @property
    def name(self) -> str:
        """Name of the adapter."""
        ...

    @property
    def source(self) -> str:
        """Directory of the adapter, as the client named it."""
        ...


class Sources(Protocol):
    """Finds the adapters that requests may use in addition to those that the workers have from the
    start."""

    def source_of(self, digest: str) -> Entry | None:
        """Returns the known adapter with the digest `digest`, or None."""
        ...


class NoSources:
    """Replacement for `Sources` where no adapters are loaded."""

    def source_of(self, digest: str) -> None:
        """Returns None: there is no such adapter."""


@dataclass(eq=False, slots=True)
class WantedLoad:
    """An adapter that a client asks to load. Its digest is not known yet."""

    name: str
    source: str
    on_end: Callable[[str, str], None]
    """Called when the load has ended: with the digest of the adapter and an empty text, or with an
    empty digest and the reason why the adapter was not loaded."""
    is_taken: bool = False
    """Whether a pipeline is loading the adapter."""
    arrival: int = 0
    """Requests with a smaller `Request.arrival` came before the client asked."""
    n_losses: int = 0
    """Number of epochs that were lost while their ranks loaded the adapter."""


class SharedAdapters:
    """The state that the adapter gates of all pipelines share."""

    def __init__(self) -> None:
        self.sources: Sources = NoSources()
        """Finds known adapters by their digests."""
        self.waiting: Counter[str] = Counter()
        """Number of the waiting requests that use an adapter, by the digest of the adapter."""
        self.wanted: list[WantedLoad] = []
        """The adapters that clients ask to load, in the order in which clients asked."""
        self.n_arrived = 0
        """1 plus the largest `Request.arrival` of the requests with an adapter that have come."""

    def want(self, wanted: WantedLoad) -> None:
        """Adds an adapter that a client asks to load."""
        wanted.arrival = self.n_arrived
        self.wanted.append(wanted)


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """An order to the ranks of a pipeline to drop adapters, and then to begin to load one."""

    dropped: tuple[int, ...]
    """Numbers of the loads whose adapters are dropped."""
    load_id: int = 0
    """Number of the load that begins; 0 if none does."""
    name: str = ""
    source: str = ""
    digest: str = ""
    """Digest that the adapter must have; empty if it is not known."""


@dataclass(slots=True)
class _Loaded:
    """An adapter that the ranks hold."""

    load_id: int
    n_running: int = 0


class _AnyDigest:
    """All digests: stands for the adapters of ranks whose adapters are not known yet."""

    def __contains__(self, digest: object) -> bool:
        return True


class AdapterGate:
    """Keeps a request waiting until the ranks of a pipeline hold its adapter, and decides which
    adapters are loaded and dropped."""

    def __init__(self, shared: SharedAdapters) -> None:
        self._shared = shared
        self.on_load_end: Callable[[str], None] = lambda end: None
        """Function that is called with one of `LOAD_ENDS` when a load ends."""
        self._fixed: Container[str] = _AnyDigest()
        self._max_loaded = 0
        # The least recently used adapter comes first.
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        self._last_id = 0
        self._load: AdapterChange | None = None  # the load that has begun and not ended
        self._wanted: WantedLoad | None = None  # the client's demand for this load
        self._was_wanted = False  # whether a client asked for the last load
        self._closed = ""  # digest of the adapter for which no further requests are admitted
        self._doomed: list[int] = []  # loads whose adapters must be dropped

    def begin(self, fixed: Iterable[str], max_loaded: int) -> None:
        """Begins an epoch. Its ranks hold the adapters with the digests `fixed`, and may hold up to
        `max_loaded` loaded adapters in addition."""
        self._fixed, self._max_loaded = frozenset(fixed), max_loaded

    @property
    def is_needed(self) -> bool:
        """Whether there may be an adapter to load or to drop, or a request that waits for an
        adapter."""
        if self._doomed or (self._max_loaded and self._next_wanted() is not None):
            return True
        if any(not self.holds(digest) for digest in self._shared.waiting):
            return True
        return any(self._is_stale(digest) for digest in self._loaded)

    def holds(self, digest: str) -> bool:
        """Returns whether the ranks hold an adapter, and requests that use it may be admitted."""
        return digest in self._fixed or (digest in self._loaded and digest != self._closed)

    def is_loading(self, digest: str) -> bool:
        """Returns whether the ranks are loading, for waiting requests, the adapter with this
        digest."""
        return self._load is not None and self._load.digest == digest

    def passes(self, request: Request) -> bool:
        """Returns whether a request uses no adapter, or one that the ranks hold."""
        return not request.adapter or self.holds(request.adapter)

    def passing(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Yields the requests in order. Leaves out waiting requests whose adapters the ranks do not
        hold, or are about to drop."""
        if all(self.holds(digest) for digest in self._shared.waiting):
            return requests
        return (one for one in requests if one.reservation is not None or self.passes(one))

    def add(self, request: Request) -> None:
        """Notes that a request waits, for the first time or again."""
        if request.adapter:
            self._shared.waiting[request.adapter] += 1
            self._shared.n_arrived = max(self._shared.n_arrived, request.arrival + 1)

    def admit(self, request: Request) -> None:
        """Notes that a waiting request is admitted. The ranks must hold its adapter."""
        if not request.adapter:
            return
        self._remove_waiting(request.adapter)
        if (loaded := self._loaded.get(request.adapter)) is not None:
            loaded.n_running += 1
            self._loaded.move_to_end(request.adapter)

    def preempt(self, request: Request) -> None:
        """Notes that a running request is preempted, so that it becomes a waiting request again.
        Must be called before the state of the request changes."""
        self.remove(request)
        self.add(request)

    def remove(self, request: Request) -> None:
        """Records that a request no longer waits or runs. Must be called before the state of the
        request changes, because the state says whether the request waited or ran."""
        if not request.adapter:
            return
        if request.state is RequestState.INITIATION:
            self._remove_waiting(request.adapter)
        elif (loaded := self._loaded.get(request.adapter)) is not None:
            loaded.n_running -= 1

    def strays(self, waiting: Iterable[Request]) -> list[Request]:
        """Returns the requests in `waiting` that would wait for ever: the ranks do not hold their
        adapter, and `SharedAdapters.sources` does not know the adapter any more. `waiting` must
        list all waiting requests."""
        lost = {
            digest
            for digest in self._shared.waiting
            if not self.holds(digest) and self._shared.sources.source_of(digest) is None
        }
        return [one for one in waiting if one.adapter in lost] if lost else []

    def next_change(self, waiting: Iterable[Request]) -> AdapterChange | None:
        """Returns the change that the ranks must make now. `waiting` lists the waiting requests in
        order. Returns None if there is nothing to do, or while the ranks load an adapter."""
        dropped, self._doomed = self._doomed, []
        for digest in [digest for digest in self._loaded if self._is_stale(digest)]:
            dropped.append(self._loaded.pop(digest).load_id)
        self._closed = ""
        begun = self._begin_load(waiting) if self._load is None else None
        if begun is None:
            return AdapterChange(tuple(dropped)) if dropped else None
        victims, load = begun
        self._load = AdapterChange(
            (*dropped, *victims), load.load_id, load.name, load.source, load.digest
        )
        return self._load

    def note_loaded(self, load_id: int, digest: str) -> None:
        """Notes that all ranks have ended the load `load_id`, and that the adapter has the digest
        `digest`."""
        self.on_load_end(LOADED)
        wanted = self._end_load()
        if digest not in self._fixed and digest not in self._loaded:
            self._loaded[digest] = _Loaded(load_id)
        else:
            self._doomed.append(load_id)  # the ranks keep it by an earlier load
        if wanted is not None:
            wanted.on_end(digest, "")

    def note_failed(self, load_id: int, failure: str) -> str:
        """Notes that a load has failed on a rank. If it was a load for waiting requests, returns
        the digest of their adapter; otherwise returns an empty text."""
        self.on_load_end(FAILED)
        load, wanted = self._load, self._end_load()
        self._doomed.append(load_id)  # some ranks may have it
        if wanted is not None:
            wanted.on_end("", failure)
        return "" if load is None else load.digest

    def reset(self, waiting: Iterable[Request]) -> None:
        """Forgets the adapters of an epoch that is over. `waiting` are all waiting requests. If the
        ranks were loading an adapter that a client asked for, any pipeline may begin this load
        again, unless `MAX_LOSSES` epochs were lost during it."""
        if self._load is not None:
            self.on_load_end(UNFINISHED)
        if self._wanted is not None:
            self._wanted.is_taken = False
            self._wanted.n_losses += 1
            if self._wanted.n_losses >= MAX_LOSSES and (lost := self._end_load()) is not None:
                lost.on_end("", LOST)
        self._load = self._wanted = None
        self._closed = ""
        self._doomed = []
        self._loaded.clear()
        self._shared.waiting.clear()
        for request in waiting:
            self.add(request)

    def _begin_load(
        self, waiting: Iterable[Request]
    ) -> tuple[tuple[int, ...], AdapterChange] | None:
        """Chooses the adapter to load next. Returns the loads whose adapters are dropped for it,
        and the load that begins. Returns None if nothing is to be loaded, or there is no room
        yet."""
        if not self._max_loaded:
            return None
        requests = [one for one in islice(waiting, N_LOOKED_AT) if one.adapter]
        turns = [self._begin_wanted, self._begin_for_request]
        for begin in reversed(turns) if self._was_wanted else turns:
            begun = begin(requests)
            if begun is not None or self._closed:
                return begun
        return None

    def _begin_wanted(self, waiting: list[Request]) -> tuple[tuple[int, ...], AdapterChange] | None:
        """Does what `_begin_load` does, for an adapter that a client asks to load."""
        wanted = self._next_wanted()
        if wanted is None:
            return None
        earlier = {one.adapter for one in waiting if one.arrival < wanted.arrival}
        victims = self._victims(earlier)
        if victims is None:
            return None
        self._wanted, wanted.is_taken = wanted, True
        self._was_wanted = True
        return victims, AdapterChange((), self._next_id(), wanted.name, wanted.source)

    def _begin_for_request(
        self, waiting: list[Request]
    ) -> tuple[tuple[int, ...], AdapterChange] | None:
        """Does what `_begin_load` does, for the first request that waits for an adapter."""
        earlier: set[str] = set()
        for request in waiting:
            digest = request.adapter
            if digest in self._fixed:
                continue
            if digest in self._loaded:
                earlier.add(digest)
                continue
            entry = self._shared.sources.source_of(digest)
            if entry is None:
                continue  # one of the strays
            victims = self._victims(earlier)
            if victims is None:
                return None
            self._was_wanted = False
            return victims, AdapterChange((), self._next_id(), entry.name, entry.source, digest)
        return None

    def _victims(self, earlier: set[str]) -> tuple[int, ...] | None:
        """Returns the loads whose adapters are dropped to make room for another. Returns None if
        there is no room yet. Adapters in `earlier` stay."""
        if len(self._loaded) < self._max_loaded:
            return ()
        candidates = [digest for digest in self._loaded if digest not in earlier]
        for digest in candidates:
            if not self._loaded[digest].n_running:
                return (self._loaded.pop(digest).load_id,)
        if candidates:
            self._closed = candidates[0]
        return None

    def _next_wanted(self) -> WantedLoad | None:
        return next((one for one in self._shared.wanted if not one.is_taken), None)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _end_load(self) -> WantedLoad | None:
        """Notes that the load in progress has ended. If a client asked for it and still waits,
        removes the client's `WantedLoad` and returns it. Otherwise returns None."""
        wanted, self._load, self._wanted = self._wanted, None, None
        if wanted is not None and wanted in self._shared.wanted:
            self._shared.wanted.remove(wanted)
            return wanted
        return None

    def _is_stale(self, digest: str) -> bool:
        """Returns whether an adapter that the ranks hold is needed no more: it was unloaded, and no
        request uses it."""
        return (
            not self._loaded[digest].n_running
            and digest not in self._shared.waiting
            and self._shared.sources.source_of(digest) is None
        )

    def _remove_waiting(self, digest: str) -> None:
        self._shared.waiting[digest] -= 1
        if not self._shared.waiting[digest]:
            del self._shared.waiting[digest]
