"""Traces with the marginals that are published of traces of production, where the files are not at
hand: `workload.read_trace` reads the files themselves.

What is published:

- Azure 2023 (Patel et al., "Splitwise", ISCA'24, section III): coding has a median of 1,500 tokens
  of prompt and 13 of output, conversation of 1,020 and 129.
- BurstGPT (Wang et al., arXiv:2401.17644): gaps between arrivals are as of a Gamma distribution,
  burstier than a Poisson process. Of its conversations with GPT-4, Llumnix (Sun et al., OSDI'24,
  Table 1) gives the 50th, 80th, 95th and 99th percentiles of lengths.

The other quantiles of Azure 2023 are those of 192 and 185 rows from the middle of the publisher's
files: a minute of an hour, which says what kind of shape it is and no more.

What is assumed: between quantiles and beyond them logarithms of lengths are normally distributed,
piece by piece. Prompts and outputs are independent; in Azure's conversations they are not. Azure's
arrivals are a Poisson process; the minute that was looked at is burstier. The variation of
BurstGPT's gaps is 2. Of Azure 2024 no quantiles were found that could be checked, so there is
nothing of it here.

Lengths are sampled by `default_rng([seed, 4])`, all prompts, then all outputs; gaps as in
`workload`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from statistics import NormalDist

import numpy as np

from simulator.workload import Lengths

NORMAL = NormalDist()
Quantiles = Sequence[tuple[float, int]]
"""Parts of all, and the lengths that these do not exceed, in tokens."""


@dataclass(frozen=True, slots=True)
class Marginal:
    """A distribution of lengths that has certain quantiles, at least two, in their order."""

    quantiles: Quantiles
    longest: int
    """Longer ones are cut, in tokens."""

    def length(self, part: float) -> int:
        """Returns the length in tokens that a part of all does not exceed, 0 < part < 1."""
        place = NORMAL.inv_cdf(part)
        points = [(NORMAL.inv_cdf(below), log(n_tokens)) for below, n_tokens in self.quantiles]
        # The last piece that begins before, or the first one; those at the ends go on.
        pieces = list(pairwise(points))
        (left, low), (right, high) = next(
            (piece for piece in reversed(pieces) if piece[0][0] <= place), pieces[0]
        )
        n_tokens = exp(low + (place - left) / (right - left) * (high - low))
        return min(self.longest, max(1, round(n_tokens)))


@dataclass(frozen=True, slots=True)
class PublishedTrace:
    """What is known of a trace."""

    prompts: Marginal
    outputs: Marginal
    variation: float
    """Standard deviation of the gaps between arrivals, as a part of their mean."""

    def lengths(self, n_requests: int, *, seed: int) -> tuple[Lengths, ...]:
        """Returns lengths with these marginals."""
        generator = np.random.default_rng([seed, 4])
        prompts, outputs = (
            [marginal.length(part) for part in generator.uniform(size=n_requests).tolist()]
            for marginal in (self.prompts, self.outputs)
        )
        return tuple(map(Lengths, prompts, outputs))


PUBLISHED: Mapping[str, PublishedTrace] = {
    "Azure 2023 coding": PublishedTrace(
        Marginal(
            ((0.1, 168), (0.25, 535), (0.5, 1500), (0.75, 2786), (0.9, 5200), (0.95, 7426)), 7437
        ),
        Marginal(((0.1, 7), (0.25, 8), (0.5, 13), (0.75, 21), (0.9, 53), (0.99, 151)), 1000),
        variation=1.0,
    ),
    "Azure 2023 conversation": PublishedTrace(
        Marginal(((0.1, 378), (0.25, 396), (0.5, 1020), (0.75, 1358), (0.9, 4085)), 7437),
        Marginal(((0.1, 45), (0.25, 67), (0.5, 129), (0.75, 387), (0.9, 428), (0.99, 599)), 1000),
        variation=1.0,
    ),
    "BurstGPT, GPT-4": PublishedTrace(
        Marginal(((0.5, 582), (0.8, 1427), (0.95, 2345), (0.99, 3549)), 7437),
        Marginal(((0.5, 243), (0.8, 434), (0.95, 669), (0.99, 964)), 1000),
        variation=2.0,
    ),
}


def bursty_arrivals(
    n_requests: int, *, rate: float, variation: float, seed: int
) -> tuple[float, ...]:
    """Returns times of `rate` requests a second, the first at 0, whose gaps have a Gamma
    distribution with this `variation`; 1 gives the times of `workload.poisson_arrivals`."""
    shape = variation**-2
    generator = np.random.default_rng([seed, 2])
    gaps = (
        generator.exponential(1.0, n_requests)
        if variation == 1.0
        else generator.gamma(shape, 1 / shape, n_requests)
    )
    gaps[:1] = 0.0
    return tuple((np.cumsum(gaps) / rate).tolist())
