"""The order in which Kubernetes should delete workers when their number is reduced. Workers in no
pipeline are deleted first, then workers of pipelines that drain, and then the workers of the
pipeline with the highest number. So one pipeline ends before a worker of another pipeline is
deleted."""

from collections.abc import Collection

from services.scheduler.pipeline.membership import Pipeline

DRAINING_COST = 1
FIRST_COST = 1000
"""Deletion cost of a worker of the pipeline with the number 0. A worker of each further pipeline
costs one less."""


def costs_of(serving: Collection[Pipeline], draining: Collection[Pipeline]) -> dict[str, int]:
    """Returns the deletion cost of each worker that is in a pipeline, by the worker's address. All
    other workers have the cost 0. `draining` has the pipelines of `serving` that are about to
    end."""
    costs: dict[str, int] = {}
    for pipeline in serving:
        cost = max(DRAINING_COST + 1, FIRST_COST - pipeline.number)
        if pipeline in draining:
            cost = DRAINING_COST
        costs |= dict.fromkeys((member.address for member in pipeline.members), cost)
    return costs
