"""A torch profile of a rank's next iterations, which the controller has ordered.

The profile is written when the last of the iterations has run, in the format of Chrome's tracing,
which Perfetto can show. Recording costs time and memory, so profiles cover few iterations.
"""

from types import TracebackType

from torch.profiler import profile


class IterationProfiler:
    """A context manager around each iteration of a rank. It records the iterations of an ordered
    profile, and does nothing otherwise."""

    def __init__(self) -> None:
        self._path = ""
        self._n_left = 0
        self._profile: profile | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether a profile has been ordered and the next iteration must be recorded."""
        return self._n_left > 0

    @property
    def is_running(self) -> bool:
        """Whether a recording has begun and has not been written yet."""
        return self._profile is not None

    def order(self, n_iterations: int, path: str) -> None:
        """Orders a recording of the next `n_iterations`, to be written to `path`.

        A recording in progress is cancelled. With 0 iterations no new recording begins.
        """
        self.call_off()
        self._n_left, self._path = n_iterations, path

    def call_off(self) -> None:
        """Cancels the order of a profile, and drops its recording."""
        running, self._profile, self._n_left = self._profile, None, 0
        if running is not None:
            running.stop()

    def __enter__(self) -> None:
        if self._n_left and self._profile is None:
            self._profile = profile(record_shapes=True)
            self._profile.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._n_left and error is None:
            self._n_left -= 1

    def take(self) -> str | None:
        """Writes the profile and returns its file, if the last ordered iteration has run. Returns
        None otherwise.

        Raises:
            OSError: the file cannot be written.
        """
        if self._profile is None or self._n_left:
            return None
        finished, self._profile = self._profile, None
        finished.stop()
        try:
            finished.export_chrome_trace(self._path)
        except RuntimeError as error:
            raise OSError(f"cannot write {self._path}: {error}") from error
        return self._path
