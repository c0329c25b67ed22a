"""Traces sampled from published distributions of production traces, for use without the files of
these traces. `workload.read_trace` reads the files themselves.

Published are:

- Azure 2023 (Patel et al., "Splitwise", ISCA'24, section III): the median lengths are 1,500 tokens
  of prompt and 13 of output for coding, 1,020 and 129 for conversation.
- BurstGPT (Wang et al., arXiv:2401.17644): gaps between arrivals have a Gamma distribution, which
  is burstier than a Poisson process. For BurstGPT's conversations with GPT-4, Llumnix (Sun et al.,
  OSDI'24, Table 1) gives the 50th, 80th, 95th and 99th percentiles of lengths.

The other quantiles of Azure 2023 come from 192 and 185 rows in the middle of the publisher's two
files. These rows are one minute of an hour, and show only the rough shape of the distribution.

Assumed are: between two quantiles and beyond the outer ones, logarithms of lengths are normally
distributed, piece by piece. Prompts and outputs are independent, although in Azure's conversations
they are not. Azure's arrivals are a Poisson process, although the minute above is burstier. The
variation of BurstGPT's gaps is 2. For Azure 2024 no quantiles were found that could be checked, so
this module has no trace of 2024.

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
"""Pairs of a part of all requests, between 0 and 1, and the length in tokens that this part does
not exceed."""


@dataclass(frozen=True, slots=True)
class Marginal:
    """A distribution of lengths, given by at least two quantiles in ascending order."""

    quantiles: Quantiles
    longest: int
    """Largest length in tokens; longer lengths are cut to this length."""

    def length(self, part: float) -> int:
        """Returns the length in tokens that a part of all requests does not exceed,
        0 < part < 1."""
        place = NORMAL.inv_cdf(part)
        points = [(NORMAL.inv_cdf(below), log(n_tokens)) for below, n_tokens in self.quantiles]
        # The last piece that begins before `place`, or the first piece. The first and the last
        # piece extend beyond the outer quantiles.
        pieces = list(pairwise(points))
        (left, low), (right, high) = next(
            (piece for piece in reversed(pieces) if piece[0][0] <= place), pieces[0]
        )
        n_tokens = exp(low + (place - left) / (right - left) * (high - low))
        return min(self.longest, max(1, round(n_tokens)))


@dataclass(frozen=True, slots=True)
class PublishedTrace:
    """The distributions of a trace: lengths of prompts and outputs, and gaps between arrivals."""

    prompts: Marginal
    outputs: Marginal
    variation: float
    """Standard deviation of the gaps between arrivals, divided by their mean."""

    def lengths(self, n_requests: int, *, seed: int) -> tuple[Lengths, ...]:
        """Returns sampled lengths of prompts and outputs with these distributions."""
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
    """Returns times of arrival, in seconds, for `rate` requests per second; the first is 0. Gaps
    have a Gamma distribution with the coefficient of variation `variation`. With the value 1, the
    result is the same as the result of `workload.poisson_arrivals`."""
    shape = variation**-2
    generator = np.random.default_rng([seed, 2])
    gaps = (
        generator.exponential(1.0, n_requests)
        if variation == 1.0
        else generator.gamma(shape, 1 / shape, n_requests)
    )
    gaps[:1] = 0.0
    return tuple((np.cumsum(gaps) / rate).tolist())
