"""Loads: requests, and the process by which they arrive."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.clients.accounts import AccountLimits, AccountUse
from simulator.engine import Arrival
from simulator.published_traces import bursty_arrivals
from simulator.workload import Lengths, all_at_once

VOCABULARY = 2**31


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at a given rate, or all at once."""

    lengths: tuple[Lengths, ...]
    variation: float = 1.0
    """Standard deviation of the gaps between arrivals, divided by their mean; 1 for a Poisson
    process."""
    context: int | None = None
    """Length of each sequence, in tokens, that clients set as a limit because they do not know the
    length of the output. None if clients know the length and set it as the limit."""
    n_beginnings: int | None = None
    """Number of different texts of which one begins each prompt and fills its first half. None if
    prompts have no common beginnings."""
    seed: int = 0

    def arrivals(self, rate: float | None) -> list[Arrival]:
        """Returns the requests with their arrival times, at `rate` requests per second on average.
        If `rate` is None, all arrive at once."""
        n = len(self.lengths)
        times_s = (
            all_at_once(n)
            if rate is None
            else bursty_arrivals(n, rate=rate, variation=self.variation, seed=self.seed)
        )
        return [
            Arrival(
                time_s,
                each.n_prompt,
                each.n_output,
                max_new_tokens=None if self.context is None else self.context - each.n_prompt,
                prompt_token_ids=prompt,
            )
            for each, time_s, prompt in zip(self.lengths, times_s, self._prompts(), strict=True)
        ]

    def _prompts(self) -> Sequence[Sequence[int] | None]:
        if self.n_beginnings is None:
            return [None] * len(self.lengths)
        generator = np.random.default_rng([self.seed, 3])
        longest = max(each.n_prompt for each in self.lengths)
        beginnings = generator.integers(1, VOCABULARY, (self.n_beginnings, longest // 2))
        chosen = generator.integers(self.n_beginnings, size=len(self.lengths)).tolist()
        return [
            [
                *beginnings[index, : each.n_prompt // 2].tolist(),
                *generator.integers(1, VOCABULARY, each.n_prompt - each.n_prompt // 2).tolist(),
            ]
            for each, index in zip(self.lengths, chosen, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class TwoClients:
    """A small client, and a large client that sends `times` as many requests. The requests of both
    have lengths from `lengths`, each of which is used once."""

    lengths: tuple[Lengths, ...]
    times: int = 10
    seed: int = 0

    def arrivals(self, small_rate: float, *, both: bool) -> list[Arrival]:
        """Returns the requests of the small client, which sends `small_rate` requests per second.
        With `both`, also returns the requests of the large client. The arrival times of the small
        client's requests do not depend on `both`."""
        n_small = len(self.lengths) // (self.times + 1)
        parts = {"small": (self.lengths[:n_small], small_rate, self.seed)}
        if both:
            parts["large"] = (self.lengths[n_small:], self.times * small_rate, self.seed + 1)
        result = []
        for name, (lengths, rate, seed) in parts.items():
            account = AccountUse(AccountLimits(), name=name)
            times_s = bursty_arrivals(len(lengths), rate=rate, variation=1.0, seed=seed)
            result += [
                Arrival(time_s, each.n_prompt, each.n_output, account=account)
                for each, time_s in zip(lengths, times_s, strict=True)
            ]
        return result
