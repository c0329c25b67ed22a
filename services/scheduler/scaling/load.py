"""The load of a model: how much work waits and runs, and how fast the pipelines work it off."""

from dataclasses import dataclass

from services.scheduler.core.admission.admission_control import AdmissionControl


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load at one moment."""

    n_serving: int = 0
    """Number of pipelines that serve."""
    n_waiting: int = 0
    """Number of requests in the pool that wait to run, or to run again."""
    n_queued_tokens: float = 0.0
    """Number of tokens that must be computed before each waiting request has its next new token."""
    queue_s: float = 0.0
    """Forecast in seconds of when the last waiting request has its first token, if the number of
    serving pipelines does not change. The value is 0 as long as too little is known."""
    n_running: int = 0
    """Number of requests that pipelines have admitted and that have not ended."""
    used: float = 0.0
    """Used capacity of the pipelines that serve, counted in pipelines: 1.5 may mean that one
    pipeline is full and another is half full."""
    n_held: int = 0
    """Number of requests that frontends hold because no pipeline serves."""
    is_known: bool = True
    """Whether a description of the model is known, which frontends need while the model is
    asleep."""

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests at all."""
        return not (self.n_waiting or self.n_running or self.n_held)


def measure(control: AdmissionControl, now: float, *, n_held: int, is_known: bool) -> Load:
    """Returns the load at the time `now`, in seconds by the clock of the admission control.
    `n_held` and `is_known` become the fields of `Load` with these names."""
    work, forecasts = control.backlog.work, control.forecasts
    return Load(
        n_serving=len(forecasts),
        n_waiting=len(control.backlog),
        n_queued_tokens=work.n_prompt_tokens,
        queue_s=forecasts.begin_all_s(work, now) if len(control.backlog) else 0.0,
        n_running=forecasts.n_running,
        used=forecasts.used,
        n_held=n_held,
        is_known=is_known,
    )
