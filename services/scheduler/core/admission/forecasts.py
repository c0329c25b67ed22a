"""The forecasts of all pipelines that serve: how soon a request begins in any of them.

The pipelines take their requests from one pool, so the waiting work before a request is divided
among them. The share of a pipeline is inversely proportional to the time that it would need for all
of the work. The shares are reused for `FRESH_S` seconds. The request begins in the pipeline that is
expected to begin it first.
"""

from math import inf

from services.scheduler.core.admission.backlog import NOTHING, WaitingWork
from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.admission.forecast import FRESH_S, Forecast, Machine
from services.scheduler.core.request import Request

LEAST_S = 1e-6
"""Smallest number of seconds that is assumed for the waiting work when it is divided."""


class Forecasts:
    """Combines the forecasts of all pipelines that serve."""

    def __init__(self, expected: ExpectedOutput) -> None:
        self._expected = expected
        self._open: list[Forecast] = []
        self._closed: list[Forecast] = []
        # The part of the waiting work that each pipeline of known speed takes.
        self._shares: list[tuple[Forecast, float]] = []
        self._shared_at = -inf

    def __len__(self) -> int:
        """Returns the number of pipelines."""
        return len(self._open)

    @property
    def is_known(self) -> bool:
        """Whether enough iterations of any pipeline have been measured for a forecast."""
        return any(forecast.is_known for forecast in self._open)

    @property
    def n_running(self) -> int:
        """Number of requests that all pipelines together have admitted and that have not ended."""
        return sum([forecast.n_running for forecast in self._open])

    @property
    def used(self) -> float:
        """Sum of the used parts of all pipelines, each between 0 and 1: 1.5 means that one and a
        half pipelines are full."""
        return sum([forecast.used for forecast in self._open])

    def open(self, machine: Machine) -> Forecast:
        """Adds a pipeline whose speed is not known yet, and returns its forecast. Reuses the
        `Forecast` of a closed pipeline, if there is one, with the averages that it has learned from
        requests."""
        forecast = self._closed.pop() if self._closed else Forecast(self._expected)
        forecast.open(machine)
        self._open.append(forecast)
        self._shared_at = -inf
        return forecast

    def close(self, forecast: Forecast) -> None:
        """Removes the forecast of a pipeline that no longer serves. A later pipeline may get the
        forecast."""
        if forecast in self._open:
            self._open.remove(forecast)
            self._closed.append(forecast)
            self._shared_at = -inf

    def learn_admission(self, request: Request) -> None:
        """Learns from an admitted request which fraction of its tokens was in the prefix cache.
        Only the forecast of the pipeline that runs the request changes."""
        for forecast in self._open:
            if forecast.runs(request):
                forecast.learn_admission(request)
                return

    def first_token_s(self, before: WaitingWork, own: WaitingWork, now: float) -> float:
        """Returns the seconds from now until a request has its first token. The request needs the
        work `own`, and the work `before` is done first. Returns 0 until enough iterations have been
        measured."""
        if len(self._open) == 1:
            return self._open[0].first_token_s(before, own, now)
        if now - self._shared_at >= FRESH_S:
            self._share(before, now)
        return min(
            (
                one.first_token_s(NOTHING.plus(before, share), own, now)
                for one, share in self._shares
            ),
            default=0.0,
        )

    def begin_all_s(self, work: WaitingWork, now: float) -> float:
        """Returns the seconds from now until the last request of the waiting work `work` has its
        first token, if all pipelines share the work. Returns 0 until enough iterations have been
        measured."""
        speeds = self._speeds(work, now)
        return 1 / (sum(speeds) * len(self._open) / len(speeds)) if speeds else 0.0

    def _speeds(self, work: WaitingWork, now: float) -> list[float]:
        """Returns, for each pipeline of known speed, the fraction of `work` that the pipeline
        begins in a second."""
        known = [forecast for forecast in self._open if forecast.is_known]
        return [1 / max(LEAST_S, one.first_token_s(work, NOTHING, now)) for one in known]

    def _share(self, before: WaitingWork, now: float) -> None:
        """Computes which share of the waiting work each pipeline of known speed takes. A pipeline
        of unknown speed is assumed to be as fast as the others on average."""
        self._shared_at = now
        known = [forecast for forecast in self._open if forecast.is_known]
        speeds = self._speeds(before, now)
        whole = sum(speeds) * len(self._open) / max(1, len(known))
        self._shares = [(one, speed / whole) for one, speed in zip(known, speeds, strict=True)]
