"""A scheduler that returns the answers of a batch when the whole batch is complete.

Engines before iteration-level scheduling returned nothing earlier (Orca, section 3, challenge 1).
Only measurements use this scheduler: a server streams tokens as they come, whatever the policy.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from services.scheduler.core.batch import Update
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.span_logprobs import NO_LOGPROBS, SpanLogprobs


class WholeBatchScheduler(Scheduler):
    """A scheduler that withholds updates until all requests that the policy answers together
    (`Policy.answered_with`) are complete."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Takes the arguments of `Scheduler`."""
        super().__init__(*arguments, **options)
        # The requests and the updates of each batch of which updates are withheld.
        self._withheld: dict[int, tuple[Collection[Request], list[Update]]] = {}

    def apply(
        self,
        iteration: int,
        token_ids: Sequence[int],
        logprobs: Mapping[int, SpanLogprobs] = NO_LOGPROBS,
        *,
        cut: Sequence[int] = (),
        broken: Sequence[int] = (),
    ) -> list[Update]:
        """Applies tokens like `Scheduler.apply`. Returns the updates of the groups of requests that
        are complete now, including updates that earlier calls withheld. A group consists of
        requests that the policy answers together."""
        updates = super().apply(iteration, token_ids, logprobs, cut=cut, broken=broken)
        return self._withhold(updates)

    def cancel(self, request: Request) -> list[Update]:
        """Cancels a request like `Scheduler.cancel`. Returns the updates of the requests that are
        answered together with this request, if all of them are complete now."""
        return self._withhold(super().cancel(request))

    def _withhold(self, updates: list[Update]) -> list[Update]:
        told: list[Update] = []
        for update in updates:
            together = self.policy.answered_with(update.request)
            if together:
                self._withheld.setdefault(id(together), (together, []))[1].append(update)
            else:
                told.append(update)
        for key, (together, waiting) in list(self._withheld.items()):
            if all(one.state is RequestState.FINISHED for one in together):
                del self._withheld[key]
                told += waiting
        return told
