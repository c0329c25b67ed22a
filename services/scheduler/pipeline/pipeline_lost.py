"""The error that ends an epoch."""

from collections.abc import Sequence

from services.common.errors import Unavailable
from services.scheduler.core.request import RequestId


class PipelineLost(Unavailable):
    """Raised when the epoch is over: a stage is gone, or an iteration does not return."""

    def __init__(
        self, message: str, *, culprits: Sequence[RequestId] = (), gone: int | None = None
    ) -> None:
        super().__init__(message)
        self.gone = gone
        """Index of the stage that is silent, or whose connection has broken; None if none is
        known."""
        self.culprits = tuple(culprits)
        """Ids of the requests that ended the epoch, and would end the next epoch, too. A request is
        known to have ended the epoch if its logits are not finite while logits of other requests in
        the batch are finite. Empty if no such requests are known."""
