"""The gates of a pipeline: they keep a request waiting until the ranks have its grammar and its
adapter."""

from collections.abc import Iterable, Iterator

from services.scheduler.core.admission.adapter_gate import AdapterGate
from services.scheduler.core.admission.grammar_gate import GrammarGate
from services.scheduler.core.request import Request


class Gates:
    """Combines the grammar gate and the adapter gate of a pipeline. A request is admitted only if
    both gates let it pass."""

    def __init__(self, grammars: GrammarGate, adapters: AdapterGate) -> None:
        self._gates = (grammars, adapters)

    @property
    def is_needed(self) -> bool:
        """Whether the ranks may have a grammar to compile, or an adapter to load or to drop."""
        grammars, adapters = self._gates
        return grammars.is_needed or adapters.is_needed

    def passes(self, request: Request) -> bool:
        """Returns whether the ranks have the grammar and the adapter of a request."""
        grammars, adapters = self._gates
        return grammars.passes(request) and adapters.passes(request)

    def passing(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Yields the requests in order. Leaves out waiting requests whose grammars or adapters the
        ranks do not have yet."""
        for gate in self._gates:
            requests = gate.passing(requests)
        return requests

    def add(self, request: Request) -> None:
        """Notes that a request waits, for the first time or again."""
        for gate in self._gates:
            gate.add(request)

    def admit(self, request: Request) -> None:
        """Notes that a waiting request is admitted."""
        for gate in self._gates:
            gate.admit(request)

    def preempt(self, request: Request) -> None:
        """Notes that a running request is preempted, so that it becomes a waiting request again.
        Must be called before the state of the request changes."""
        for gate in self._gates:
            gate.preempt(request)

    def remove(self, request: Request) -> None:
        """Records that a request no longer waits or runs. Must be called before the state of the
        request changes."""
        for gate in self._gates:
            gate.remove(request)

    def reset(self, waiting: Iterable[Request]) -> None:
        """Forgets which grammars and adapters the ranks had in an epoch that is over. `waiting` are
        all waiting requests."""
        requests = list(waiting)
        for gate in self._gates:
            gate.reset(requests)
