"""How evenly clients share a system: Jain's index over the clients in a window of time.

The index compares each client's tokens, prompts and outputs, with the client's even share. The even
share is the client's tokens if the capacity were divided evenly and no client got more than its
demand. For two clients the index is 1 if both get the same part of their shares, and 1/2 if one
gets everything (Jain et al., "A Quantitative Measure of Fairness and Discrimination", DEC-TR-301,
1984).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.outcome import Outcome, RequestTimes


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run, in seconds of its virtual time."""

    begin_s: float
    end_s: float

    def has(self, time_s: float) -> bool:
        """Returns whether a time is in the window."""
        return self.begin_s <= time_s < self.end_s

    def n_output(self, request: RequestTimes) -> float:
        """Returns how many output tokens of a request came in the window, assuming equal times
        between its tokens."""
        first = float(self.has(request.first_token_s))
        length_s = request.end_s - request.first_token_s
        if request.n_output == 1 or length_s <= 0:
            return first * request.n_output
        inside_s = min(request.end_s, self.end_s) - max(request.first_token_s, self.begin_s)
        return first + max(0.0, inside_s) / length_s * (request.n_output - 1)

    def n_tokens(self, request: RequestTimes) -> float:
        """Returns how many tokens of a request were computed in the window. A prompt counts at the
        time of the first output token."""
        return self.n_output(request) + request.n_prompt * self.has(request.first_token_s)


def fairness(outcome: Outcome, window: Window) -> float:
    """Returns Jain's index over the clients in a window. The demand of a client is the number of
    tokens that its requests had left at the beginning of the window, over all requests that arrived
    before the end of the window."""
    got: defaultdict[str | None, float] = defaultdict(float)
    demands: defaultdict[str | None, float] = defaultdict(float)
    before = Window(float("-inf"), window.begin_s)
    for request in outcome.requests:
        if request.arrival_s < window.end_s and request.end_s > window.begin_s:
            n_left = request.n_prompt + request.n_output - before.n_tokens(request)
            got[request.account] += window.n_tokens(request)
            demands[request.account] += n_left
    return jain_index([got[one] for one in demands], list(demands.values()))


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
