"""The order in which workers should go when their number is reduced, so that whole pipelines go and
not a worker of each.

Workers in no pipeline go first, then those of pipelines that drain, and then those of the pipeline
with the highest number.
"""

from collections.abc import Collection

from services.scheduler.pipeline.membership import Pipeline

DRAINING_COST = 1
FIRST_COST = 1000
"""Cost of a worker of the pipeline with the number 0."""


def costs_of(serving: Collection[Pipeline], draining: Collection[Pipeline]) -> dict[str, int]:
    """Returns the costs of losing the workers in pipelines, by address. Any other worker costs 0.
    `draining` are those among the `serving` pipelines that are about to end."""
    costs: dict[str, int] = {}
    for pipeline in serving:
        cost = max(DRAINING_COST + 1, FIRST_COST - pipeline.number)
        if pipeline in draining:
            cost = DRAINING_COST
        costs |= dict.fromkeys((member.address for member in pipeline.members), cost)
    return costs
