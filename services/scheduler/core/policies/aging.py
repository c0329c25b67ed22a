"""Shortest remaining output first, with aging, so that no request starves (after the starvation
prevention of Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS'24).

A request's claim is the predicted number of tokens left, as in `shortest.py`, plus
`TOKENS_PER_ARRIVAL` for each request that arrived before it. So each later arrival has to be
shorter by that much to come first. A request that is expected to generate n tokens is therefore
overtaken by at most n / `TOKENS_PER_ARRIVAL` later requests, however short these are. The guarantee
counts arrivals and not seconds, so the policy needs no clock, and a recording can be replayed.
"""

from typing import ClassVar

from services.scheduler.core.policies.shortest import ShortestPolicy
from services.scheduler.core.request import Request

TOKENS_PER_ARRIVAL = 4
"""Number of tokens by which the claim of a request is worse for each earlier arrival. With 0,
requests may starve, and with very many, requests come in the order of their arrival."""


class AgingPolicy(ShortestPolicy):
    """The policy `aging`: the requests with the fewest tokens left come first, with an advantage
    for requests that arrived earlier."""

    name: ClassVar[str] = "aging"

    def claim(self, request: Request) -> float:
        """Returns the predicted number of tokens left, plus `TOKENS_PER_ARRIVAL` for each request
        that arrived before this one."""
        return super().claim(request) + TOKENS_PER_ARRIVAL * request.arrival
