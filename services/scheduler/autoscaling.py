"""Makes the autoscaler of a leader. The autoscaler reports the wanted number of pipelines to
metrics, and reports to frontends whether the model is asleep."""

from collections.abc import Callable

from orcinus.v1.scheduler_pb2 import SleepState

from services.scheduler.cluster.replicas import ReplicaStore
from services.scheduler.core.admission.admission_control import AdmissionControl
from services.scheduler.scaling.autoscaler import Autoscaler
from services.scheduler.scaling.load import Load, measure
from services.scheduler.scaling.size import SizeLimits
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings


def build_autoscaler(
    settings: SchedulerSettings,
    workers: ReplicaStore,
    *,
    n_stages: int,
    control: AdmissionControl,
    service: SchedulerService,
    on_wanted: Callable[[int], None],
) -> Autoscaler:
    """Returns an autoscaler that sets the number of workers in the store `workers` according to the
    load. The load is measured from `control` and `service`. `on_wanted` is called with the wanted
    number of pipelines.

    If `min_pipelines` is 0, so that the model may sleep, `service` reports to frontends whether the
    model is asleep or starting.
    """

    def load_at(now: float) -> Load:
        known = service.known.is_known
        return measure(control, now, n_held=service.n_held, is_known=known)

    def note_wanted(n_pipelines: int) -> None:
        on_wanted(n_pipelines)
        if settings.min_pipelines == 0:
            is_asleep = n_pipelines == 0
            service.note_sleep(
                SleepState.SLEEP_STATE_ASLEEP if is_asleep else SleepState.SLEEP_STATE_STARTING
            )

    return Autoscaler(
        workers,
        SizeLimits(
            min_pipelines=settings.min_pipelines,
            max_pipelines=settings.max_pipelines or settings.min_pipelines,
            queue_goal_s=settings.queue_goal_s,
            scale_down_after_s=settings.scale_down_after_s,
            sleep_after_s=settings.sleep_after_s,
        ),
        n_stages=n_stages,
        n_spare_workers=settings.n_spare_workers,
        measure=load_at,
        on_wanted=note_wanted,
    )
