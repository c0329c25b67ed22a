"""Runs a workload on a real system for a limited time, and compares the result with the prediction.

Only the part of the workload that fits into the time limit is run. It is compared with a simulation
of the same part. A run that exceeds the limit is cut off, and then compared with the simulation by
the time that each took for the same number of tokens.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from services.tune.calibration import MeasuredIteration, iterations_of
from services.tune.search import Prediction
from services.tune.system import Prompt, Record, System, TimedReply
from services.tune.workload import Workload
from simulator.engine import Simulation
from simulator.outcome import Outcome, RequestTimes


@dataclass(frozen=True, slots=True)
class Check:
    """The result of running a candidate's settings on a real system."""

    value: float
    """Value for the whole workload, as measured by this run, in the unit of `Workload.value_of`;
    larger is better. If only a part of the workload was run, or if it was run at a lower rate, this
    is an estimate: the predicted value of the whole workload, multiplied by the ratio of the
    measured to the predicted value of the run."""
    is_whole: bool
    """Whether all requests of the workload were run to their end."""
    iterations: tuple[MeasuredIteration, ...]
    has_failed: bool = False
    """Whether the system did not serve, so that the candidate must not be chosen."""


async def run_load(
    system: System, prompts: Sequence[tuple[float, Prompt]], *, limit_s: float
) -> tuple[list[tuple[float, TimedReply]], float]:
    """Sends each prompt at its due time, which is in seconds after the start. Cancels requests that
    have not ended `limit_s` seconds after the start.

    Returns a list with the due time and the reply of each prompt, and the time of the start. All
    these times are on the event loop's clock.

    Raises:
        SystemFailed: a request has failed.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    replies = [(start_s + due_s, TimedReply(0.0)) for due_s, _ in prompts]

    async def send(due_s: float, prompt: Prompt, reply: TimedReply) -> None:
        await asyncio.sleep(due_s - loop.time())
        await system.ask(prompt, reply)

    tasks = [
        asyncio.create_task(send(due_s, prompt, reply))
        for (due_s, reply), (_, prompt) in zip(replies, prompts, strict=True)
    ]
    try:
        done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return replies, start_s


async def check(
    system: System,
    workload: Workload,
    prediction: Prediction,
    simulation: Simulation,
    prompts: Sequence[Sequence[int]],
    *,
    limit_s: float,
) -> Check:
    """Runs the requests of a simulation on a real system for at most `limit_s` seconds, then runs
    the simulation, and compares both. `simulation` must not have begun. `prompts` has the tokens of
    each request's prompt. `prediction` is the prediction for the whole workload.

    Raises:
        SystemFailed: a request failed.
    """
    load = [
        (arrival.time_s, Prompt(tokens, arrival.n_output))
        for arrival, tokens in zip(simulation.arrivals, prompts, strict=True)
    ]
    async with system.recorded() as records:
        replies, start_s = await run_load(system, load, limit_s=limit_s)
    iterations = tuple(iterations_of(records))
    predicted = simulation.run()
    if not all(reply.is_complete for _, reply in replies):
        return Check(prediction.value * speed(simulation, records), False, iterations)
    value = workload.value_of(outcome_of(replies, start_s))
    is_whole = len(replies) == len(workload.lengths)
    if is_whole and not workload.finds_rate:
        return Check(value, True, iterations)
    ratio = value / max(1e-9, workload.value_of(predicted))
    return Check(prediction.value * ratio, is_whole, iterations)


def speed(simulation: Simulation, records: Sequence[Record]) -> float:
    """Returns simulated time divided by real time for the same number of tokens: 2.0 means that the
    real system is twice as fast as the simulation. Returns 1.0 if no tokens were computed. The
    simulation must have ended."""
    ordered = sorted(records, key=lambda record: record.iteration)
    n_tokens = sum(sum(record.n_tokens) for record in ordered)
    if not n_tokens or not simulation.progress:
        return 1.0
    first, last = ordered[0], ordered[-1]
    start_ns, end_ns = first.sent_unix_ns, last.sent_unix_ns + last.round_trip_ns
    place = bisect_left(simulation.progress, (n_tokens, 0.0))
    _, simulated_s = simulation.progress[min(place, len(simulation.progress) - 1)]
    return simulated_s / max(1e-9, (end_ns - start_ns) / 1e9)


def outcome_of(replies: Sequence[tuple[float, TimedReply]], start_s: float) -> Outcome:
    """Returns the outcome of a run on a real system, with times as the client measured them. All
    requests must have ended. `start_s` is the time of the start."""
    requests = [
        RequestTimes(
            arrival_s=due_s - start_s,
            first_token_s=reply.token_times_s[0] - start_s,
            end_s=reply.token_times_s[-1] - start_s,
            n_output=len(reply.token_times_s),
        )
        for due_s, reply in replies
    ]
    requests.sort(key=lambda request: request.end_s)
    return Outcome(
        requests=tuple(requests),
        n_output=sum(request.n_output for request in requests),
        duration_s=requests[-1].end_s - min(request.arrival_s for request in requests),
    )
