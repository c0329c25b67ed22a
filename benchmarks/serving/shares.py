"""How evenly clients share a system: Jain's index over the clients in a window of time.

The index compares each client's tokens, prompts and outputs, with the client's even share. The even
share is the client's tokens if the capacity were divided evenly and no client got more than its
demand. For two clients the index is 1 if both get the same part of their shares, and 1/2 if one
gets everything (Jain et al., "A Quantitative Measure of Fairness and Discrimination", DEC-TR-301,
1984).
"""

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


def even_shares(total: float, demands: Sequence[float]) -> list[float]:
    """Returns each client's share of a total that is divided evenly, where no client gets more than
    its demand (max-min fairness)."""
    shares = [0.0] * len(demands)
    hungry = [index for index, demand in enumerate(demands) if demand > 0]
    for n_left, index in zip(
        range(len(hungry), 0, -1), sorted(hungry, key=lambda each: demands[each]), strict=True
    ):
        shares[index] = min(demands[index], total / n_left)
        total -= shares[index]
    return shares


def jain_index(got: Sequence[float], demands: Sequence[float]) -> float:
    """Returns Jain's index of the received tokens as parts of the even shares; 1 if no client
    received tokens."""
    shares = even_shares(sum(got), demands)
    parts = [each / share for each, share in zip(got, shares, strict=True) if share > 0]
    squares = sum(part**2 for part in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else 1.0
