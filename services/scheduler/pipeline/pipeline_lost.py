"""The error that is raised when an epoch is over."""

from services.common.errors import Unavailable


class PipelineLost(Unavailable):
    """Raised when the epoch is over: a stage is gone, or an iteration does not return."""

    def __init__(
        self,
        message: str,
        *,
        gone: int | None = None,
        iteration: int = 0,
        is_by_itself: bool = False,
    ) -> None:
        super().__init__(message)
        self.gone = gone
        """Index of the stage that is silent, or whose connection has broken; None if none is
        known."""
        self.iteration = iteration
        """The iteration that a rank computed when the rank failed; 0 if that is not known."""
        self.is_by_itself = is_by_itself
        """Whether a rank failed by itself: nothing outside has stopped or killed it."""
