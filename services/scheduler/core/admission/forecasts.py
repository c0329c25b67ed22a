"""The forecasts of all pipelines that serve: how soon a request begins in any of them.

The pipelines take their requests from one pool, so the waiting work before a request is divided
among them. It is divided evenly, since the pipelines of one model are about equally fast. The
request begins in the pipeline that is expected to begin it first.
"""

from services.scheduler.core.admission.backlog import NOTHING, WaitingWork
from services.scheduler.core.admission.expected_output import ExpectedOutput
from services.scheduler.core.admission.forecast import Forecast, Machine
from services.scheduler.core.request import Request


class Forecasts:
    """A forecast for each pipeline that serves."""

    def __init__(self, expected: ExpectedOutput) -> None:
        self._expected = expected
        self._open: list[Forecast] = []
        self._closed: list[Forecast] = []

    @property
    def is_known(self) -> bool:
        """Whether enough iterations are known for a forecast."""
        return any(forecast.is_known for forecast in self._open)

    def open(self, machine: Machine) -> Forecast:
        """Begins with a pipeline whose speed is not known yet, and returns its forecast. What an
        earlier pipeline has learned about requests is kept."""
        forecast = self._closed.pop() if self._closed else Forecast(self._expected)
        forecast.open(machine)
        self._open.append(forecast)
        return forecast

    def close(self, forecast: Forecast) -> None:
        """Ends with a pipeline."""
        if forecast in self._open:
            self._open.remove(forecast)
            self._closed.append(forecast)

    def learn_admission(self, request: Request) -> None:
        """Learns from an admitted request, for the pipeline that runs the request."""
        for forecast in self._open:
            if forecast.runs(request):
                forecast.learn_admission(request)
                return

    def first_token_s(self, before: WaitingWork, own: WaitingWork, now: float) -> float:
        """Returns the seconds from now until a request has its first token. The request needs the
        work `own`, and the work `before` is done first. Returns 0 as long as too little is
        known."""
        if len(self._open) > 1:
            before = NOTHING.plus(before, 1 / len(self._open))
        known = [forecast for forecast in self._open if forecast.is_known]
        return min((one.first_token_s(before, own, now) for one in known), default=0.0)
