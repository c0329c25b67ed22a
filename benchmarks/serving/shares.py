"""The number of tokens that each client receives and demands in windows of time.
`simulator.fairness` computes Jain's index from these numbers."""

from collections.abc import Sequence

from benchmarks.records import RequestRecord

WINDOW_S = 5.0
"""Length of a time window in seconds."""


def served(of_one: Sequence[RequestRecord], n_windows: int) -> list[float]:
    """Returns the number of tokens that a client received in each window. The prompt tokens of a
    request count at the time of its first output token."""
    windows = [0.0] * n_windows
    for record in of_one:
        for index, time_s in enumerate(record.token_times_s):
            window = int(time_s / WINDOW_S)
            if window < n_windows:
                windows[window] += 1 if index else 1 + record.n_prompt
    return windows


def demanded(of_one: Sequence[RequestRecord], n_windows: int) -> list[float]:
    """Returns the number of tokens that a client demands in each window: the tokens of the requests
    that arrive in the window, and the demanded tokens that were not served in earlier windows."""
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
