"""Whether anything is left of requests that are over, by the metrics of the services."""

from tests.exposition import Samples

ENDS = ("finished", "cancelled", "failed")


def leftovers(frontend: Samples, scheduler: Samples) -> dict[str, float]:
    """Returns the state that requests have left in the services, by kind. Empty if there is
    none."""
    n_ended = sum(_total(scheduler, end) for end in ENDS)
    counts = {
        "the frontend's answers": frontend.sum("orcinus_frontend_answers_in_flight"),
        "waiting requests": scheduler.sum("orcinus_requests_waiting"),
        "running requests": scheduler.sum("orcinus_requests_running"),
        "requests not accounted for": _total(scheduler, "accepted") - n_ended,
    }
    return {name: count for name, count in counts.items() if count}


def _total(samples: Samples, what: str) -> float:
    return samples.sum(f"orcinus_requests_{what}_total")
