"""Explains the chosen settings: compares them with neighbouring values and with other layouts."""

from collections.abc import Iterator
from dataclasses import replace

from services.common.memory_limit import MIB
from services.tune.calibration import iteration_s
from services.tune.choice import Tried, Tuned
from services.tune.search import Candidate, Prediction
from simulator.costs import IterationWork
from simulator.outcome import LatencyLimits

NOISY = 0.15
"""Relative error of a calibration above which a warning says that its predictions are doubtful."""
TYPICAL_CONTEXT = 256
"""Number of tokens of each request's context in the iterations that serve as examples in the
explanations."""


def reasons(tuned: Tuned) -> Iterator[str]:
    """Yields sentences that explain the chosen settings: a warning if measurements were noisy, a
    comparison with the default settings, one sentence about each setting, and one about each other
    layout."""
    error = max(each.calibration.error for each in tuned.tried)
    if error > NOISY:
        yield (
            f"This machine did other things too: times of equal iterations differ by {error:.0%}. "
            "Find settings again when it does not."
        )
    tried, chosen = tuned.of_chosen, tuned.chosen
    candidate = chosen.candidate
    yield _beside_the_defaults(tuned)
    if tuned.limits.are_set:
        yield _within_limits(chosen, tuned.limits)
    size, tokens = candidate.max_batch_size, candidate.max_batch_tokens
    yield (
        f"max_batch_size {size}: {_beside(tried, chosen, _sized(candidate))}; a batch of {size} "
        f"decodes takes {_ms(tried, size)}, one alone {_ms(tried, 1)}."
    )
    yield f"max_batch_tokens {tokens}: {_beside(tried, chosen, _tokened(candidate))}."
    slots = tuned.kv_memory / tried.kv_bytes_per_slot
    yield (
        f"kv_memory {tuned.kv_memory // MIB} MiB for each rank: room for {slots:.0f} tokens, where "
        f"the workload reserved {chosen.outcome.max_reserved_slots} at most; what is left keeps "
        "prefixes that may be shared."
    )
    for other in tuned.tried:
        if other is not tried:
            yield _why_not(other, tried, chosen)
    yield from tuned.not_tried


def _beside_the_defaults(tuned: Tuned) -> str:
    checks, candidate = tuned.checks, tuned.chosen.candidate
    runs = {each: check for each, check in checks.items() if not check.has_failed}
    default = runs.get(tuned.default)
    if len(runs) < 2 or candidate not in runs or default is None:
        return "Predicted only: there was no time, by budget_s, to run it beside the defaults."
    if candidate == tuned.default:
        return f"These are the defaults: of {len(runs)} settings that were run, none did better."
    gain = f"{runs[candidate].value / default.value:.2f} x" if default.value else "more than"
    return f"Measured: {gain} what the defaults do ({tuned.default})."


def _within_limits(chosen: Prediction, limits: LatencyLimits) -> str:
    outcome = chosen.outcome
    rate = "all at once" if chosen.rate is None else f"{chosen.rate:.3g} requests/s"
    return (
        f"At {rate}, {outcome.kept(limits):.0%} should keep the limits; 99 of 100 have their first "
        f"token in {outcome.p99_ttft_s:.3g} s, and each further one in {outcome.p99_tpot_s:.3g} s."
    )


def _sized(candidate: Candidate) -> list[tuple[str, Candidate]]:
    size = candidate.max_batch_size
    return [
        (str(other), replace(candidate, max_batch_size=other))
        for other in (size // 2, 2 * size)
        if 1 <= other <= candidate.max_batch_tokens
    ]


def _tokened(candidate: Candidate) -> list[tuple[str, Candidate]]:
    tokens = candidate.max_batch_tokens
    return [
        (str(other), replace(candidate, max_batch_tokens=other))
        for other in (tokens // 2, 2 * tokens)
        if other >= candidate.max_batch_size
    ]


def _beside(tried: Tried, chosen: Prediction, others: list[tuple[str, Candidate]]) -> str:
    return ", ".join(
        f"{name} would give {_difference(tried.predictor(other), chosen)}" for name, other in others
    )


def _difference(other: Prediction, chosen: Prediction) -> str:
    if not chosen.value and other.value:
        return "more"
    gain = other.value / chosen.value - 1 if chosen.value else 0.0
    if abs(gain) >= 0.005:
        return f"{abs(gain):.1%} {'less' if gain < 0 else 'more'}"
    latency = other.latency_s / max(1e-12, chosen.latency_s) - 1
    if abs(latency) < 0.005:
        return "the same"
    return f"as much, with {abs(latency):.1%} {'more' if latency > 0 else 'less'} latency"


def _why_not(other: Tried, tried: Tried, chosen: Prediction) -> str:
    size = chosen.candidate.max_batch_size
    text = f"{other.layout}: {_difference(other.best, chosen)} at its best"
    share = -(-size // other.layout.stages)
    if other.layout.stages > 1:
        busy = min(other.best.outcome.busy)
        text += (
            f"; its stages take {_ms(other, share)} in all for their {share} of {size} decodes, "
            f"and the idlest one is busy for {busy:.0%} of the time"
        )
    else:
        text += f"; a batch of {size} decodes takes {_ms(other, size)} and not {_ms(tried, size)}"
    return f"{text}{' (seen at a glance)' * other.is_hopeless}."


def _ms(tried: Tried, n_decodes: int) -> str:
    work = IterationWork.of([(TYPICAL_CONTEXT, 1, True)] * n_decodes)
    return f"{1e3 * iteration_s(tried.calibration.costs, work):.3g} ms"
