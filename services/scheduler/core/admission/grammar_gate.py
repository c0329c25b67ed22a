"""The gate at which a request waits until the ranks have compiled the grammar of its output.

A rank can choose a token of such a request only with the compiled grammar, and a batch must never
wait for a grammar. So the ranks compile while iterations go on, and the request is admitted when
all ranks that sample have reported that they have the grammar. Meanwhile the request keeps its
place in the order, and requests behind it may be admitted. When its grammar is compiled, it is
admitted before the requests behind it that still wait.

One grammar is compiled at a time. The next one is the first, in the order of the pool, among the
grammars that the next waiting requests need. So a request waits for its own grammar, and for at
most one grammar of each request that comes before it.

Ranks keep the grammars of running requests and `MAX_COMPILED_GRAMMARS` others. The gate decides
which: first the grammars that the next waiting requests need, then the most recently used ones.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from services.common.sampling import MAX_COMPILED_GRAMMARS
from services.scheduler.core.request import Request, RequestState

N_LOOKED_AT = 64
"""Only the grammars of this many waiting requests, the first in the order, are considered for
compilation. The limit keeps the search short in each iteration."""


@dataclass(frozen=True, slots=True)
class DueGrammar:
    """A grammar that the ranks must compile now."""

    digest: bytes
    grammar: bytes
    """The grammar, as UTF-8."""
    kept: tuple[bytes, ...]
    """Digests of the grammars that the ranks must keep, if they have them."""


class GrammarGate:
    """Keeps a request waiting until the sampling ranks of a pipeline have compiled its grammar, and
    chooses the grammar to compile next."""

    def __init__(self, waiting: Counter[bytes] | None = None) -> None:
        """`waiting`, if given, counts the waiting requests of each grammar, for all pipelines."""
        self._waiting: Counter[bytes] = Counter() if waiting is None else waiting
        # Running requests of each compiled grammar; the least recently used grammar comes first.
        self._compiled: OrderedDict[bytes, int] = OrderedDict()
        self._due: bytes | None = None  # the grammar that the ranks compile

    @property
    def is_needed(self) -> bool:
        """Whether a waiting request needs a grammar that is not compiled."""
        return not self._waiting.keys() <= self._compiled.keys()

    def add(self, request: Request) -> None:
        """Notes that a request waits, for the first time or again."""
        if request.grammar_digest is not None:
            self._waiting[request.grammar_digest] += 1

    def admit(self, request: Request) -> None:
        """Notes that a waiting request is admitted. If the request has a grammar, the ranks must
        have compiled it before."""
        digest = request.grammar_digest
        if digest is not None:
            self._remove_waiting(digest)
            self._compiled[digest] += 1
            self._compiled.move_to_end(digest)

    def preempt(self, request: Request) -> None:
        """Notes that a running request is preempted, so that it becomes a waiting request again.
        Must be called before the state of the request changes."""
        self.remove(request)
        self.add(request)

    def remove(self, request: Request) -> None:
        """Records that a request no longer waits or runs. Must be called before the state of the
        request changes, because the state says whether the request waited or ran."""
        digest = request.grammar_digest
        if digest is None:
            return
        if request.state is RequestState.INITIATION:
            self._remove_waiting(digest)
        else:
            self._compiled[digest] -= 1

    def has_compiled(self, digest: bytes) -> bool:
        """Returns whether the ranks have compiled the grammar with this digest."""
        return digest in self._compiled

    def passes(self, request: Request) -> bool:
        """Returns whether a request has no grammar, or one that the ranks have compiled."""
        return request.grammar_digest is None or request.grammar_digest in self._compiled

    def passing(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Yields the requests in order. Leaves out waiting requests whose grammars are not compiled
        yet."""
        if not self.is_needed:
            return requests
        return (one for one in requests if one.reservation is not None or self.passes(one))

    def next_due(self, waiting: Iterable[Request]) -> DueGrammar | None:
        """Returns the grammar that the ranks must compile next. `waiting` lists the waiting
        requests in order. Returns None if no grammar is needed, or while the ranks compile another
        one."""
        if self._due is not None:
            return None
        wanted = _first_of_each(islice(waiting, N_LOOKED_AT))
        for digest, request in wanted.items():
            if digest not in self._compiled:
                self._make_room(wanted)
                kept = tuple(dict.fromkeys((*self._compiled, *wanted)))
                self._due = digest
                return DueGrammar(digest, request.grammar, kept)
        return None

    def note_compiled(self, digest: bytes) -> None:
        """Notes that all ranks that sample have compiled the grammar that `next_due` returned
        last."""
        self._due = None
        self._compiled[digest] = 0

    def note_failed(self) -> None:
        """Notes that the ranks cannot compile the grammar that `next_due` returned last."""
        self._due = None

    def reset(self, waiting: Iterable[Request]) -> None:
        """Forgets the grammars of an epoch that is over, because the next epoch may have other
        ranks. `waiting` are all waiting requests."""
        self._due = None
        self._compiled.clear()
        self._waiting.clear()
        for request in waiting:
            self.add(request)

    def _make_room(self, wanted: Iterable[bytes]) -> None:
        """Drops the least recently used grammars if ranks would have to keep too many. Never drops
        a grammar of a running request or in `wanted`."""
        unused = [digest for digest, n_running in self._compiled.items() if not n_running]
        n_over = len(unused) + 1 - MAX_COMPILED_GRAMMARS
        dropped = [digest for digest in unused if digest not in set(wanted)]
        for digest in dropped[: max(0, n_over)]:
            del self._compiled[digest]

    def _remove_waiting(self, digest: bytes) -> None:
        self._waiting[digest] -= 1
        if not self._waiting[digest]:
            del self._waiting[digest]


def _first_of_each(requests: Iterable[Request]) -> dict[bytes, Request]:
    """Returns the first of `requests` that uses each grammar, by the digest of the grammar. Stops
    after `MAX_COMPILED_GRAMMARS` grammars."""
    found: dict[bytes, Request] = {}
    for request in requests:
        if request.grammar_digest is not None:
            found.setdefault(request.grammar_digest, request)
            if len(found) == MAX_COMPILED_GRAMMARS:
                break
    return found
