"""The tokens that clients receive and want in windows of time, of which `simulator.fairness` makes
Jain's index."""

from collections.abc import Sequence

from benchmarks.records import RequestRecord

WINDOW_S = 5.0
"""Length of a window in seconds."""


def served(of_one: Sequence[RequestRecord], n_windows: int) -> list[float]:
    """Returns the tokens that a client received in each window. The tokens of a prompt count at the
    time of the first output token."""
    windows = [0.0] * n_windows
    for record in of_one:
        for index, time_s in enumerate(record.token_times_s):
            window = int(time_s / WINDOW_S)
            if window < n_windows:
                windows[window] += 1 if index else 1 + record.n_prompt
    return windows


def demanded(of_one: Sequence[RequestRecord], n_windows: int) -> list[float]:
    """Returns the tokens that a client wants in each window: the tokens of requests that arrive in
    the window, and the tokens that earlier windows left over."""
    windows = [0.0] * n_windows
    for record in of_one:
        window = int(record.arrival_s / WINDOW_S)
        if window < n_windows:
            windows[window] += record.n_prompt + record.n_output
    got, left = served(of_one, n_windows), 0.0
    for window, tokens in enumerate(windows):
        windows[window] = left + tokens
        left = max(0.0, windows[window] - got[window])
    return windows
