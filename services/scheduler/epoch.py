"""The objects that serve one pipeline from its formation to its end."""

from dataclasses import dataclass

from services.scheduler.core.scheduler import Scheduler
from services.scheduler.observing.iteration_observer import IterationObservers
from services.scheduler.pipeline.drain import Drain
from services.scheduler.pipeline.engine_master import EngineMaster
from services.scheduler.pipeline.membership import Pipeline
from services.scheduler.serving_loop import ServingLoop


@dataclass(frozen=True, slots=True)
class Epoch:
    """Holds the objects that serve a pipeline during one epoch: its workers, its scheduling core,
    its engine master, its serving loop, and others."""

    pipeline: Pipeline
    scheduler: Scheduler
    """The scheduling core, with its own accounts of the pipeline's K/V memory."""
    engine: EngineMaster
    loop: ServingLoop
    observers: IterationObservers
    drain: Drain
