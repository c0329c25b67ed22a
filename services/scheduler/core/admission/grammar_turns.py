"""Turns of requests whose output follows a grammar: each iteration admits at most one grammar that
is not yet compiled.

The ranks of the last stage compile the grammars of admitted requests one after another, and an
iteration waits for the grammars of its requests. Frontends refuse a grammar that takes long to
compile, but a batch may contain many grammars. So a request whose grammar must be compiled waits
while another grammar is compiled in the same iteration, and the requests behind it are admitted
first. No request waits for ever, since the first request in the order is never held back.

Ranks keep the most recently used grammars. The scheduler can tell which grammars these are from the
admissions alone.
"""

from collections import OrderedDict
from collections.abc import Iterator

from services.common.sampling import MAX_COMPILED_GRAMMARS
from services.scheduler.core.request import Request


class GrammarTurns:
    """The grammars that all ranks have compiled in this epoch, and the turns of requests with other
    grammars."""

    def __init__(self) -> None:
        self._n_requests = 0  # number of requests in the pool that have a grammar
        self._compiled: OrderedDict[bytes, None] = OrderedDict()

    def add(self, request: Request) -> None:
        """Notes that a request has come into the pool."""
        self._n_requests += request.grammar_digest is not None

    def remove(self, request: Request) -> None:
        """Notes that a request has left the pool."""
        self._n_requests -= request.grammar_digest is not None

    def turns(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Yields the requests, in order, without the requests that must wait for their turn."""
        return self._turns(requests) if self._n_requests else requests

    def admit(self, request: Request) -> None:
        """Notes that a request is admitted, so that the ranks compile its grammar."""
        grammar = request.grammar_digest
        if grammar is None:
            return
        self._compiled[grammar] = None
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > MAX_COMPILED_GRAMMARS:
            self._compiled.popitem(last=False)

    def forget(self) -> None:
        """Forgets the grammars of an epoch that is over: the next one may have other ranks."""
        self._compiled.clear()

    def _turns(self, requests: Iterator[Request]) -> Iterator[Request]:
        compiling: bytes | None = None
        for request in requests:
            grammar = request.grammar_digest
            is_new = request.reservation is None and grammar not in self._compiled
            if grammar is not None and is_new:
                compiling = compiling or grammar
                if grammar != compiling:
                    continue
            yield request
