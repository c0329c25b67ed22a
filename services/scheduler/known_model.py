"""The description of the model, which a leader keeps also while no pipeline serves.

A frontend can answer questions about a model that is asleep only if it knows the model's limits.
Workers report these. So the leader keeps the description of the pipeline that served last, and the
next leader gets it as a text.
"""

import logging

from google.protobuf import json_format
from orcinus.v1 import scheduler_pb2
from orcinus.v1.scheduler_pb2 import SleepState

log = logging.getLogger(__name__)

_STATES: dict[SleepState, str] = {
    SleepState.SLEEP_STATE_ASLEEP: "asleep",
    SleepState.SLEEP_STATE_STARTING: "starting",
}


class KnownModel:
    """Keeps the description of the pipeline that serves or served last, and the state of the model
    while no pipeline serves."""

    def __init__(self) -> None:
        self.pipeline = scheduler_pb2.PipelineDescription()
        """Description of the pipeline that serves, or served last; all fields are empty if no such
        pipeline is known."""
        self.sleep_state = SleepState.SLEEP_STATE_UNSPECIFIED
        """Whether the model is asleep or being started while no pipeline serves. Unspecified if the
        model is never put to sleep."""

    @property
    def is_known(self) -> bool:
        """Whether a pipeline has served, under this leader or an earlier one."""
        return bool(self.pipeline.model)

    @property
    def state_without_pipeline(self) -> str:
        """State of the model while no pipeline serves: `asleep`, `starting` or `unavailable`."""
        return _STATES.get(self.sleep_state, "unavailable")

    @property
    def sleep(self) -> scheduler_pb2.Sleep | None:
        """The message for frontends while no pipeline serves. None if the model is never put to
        sleep."""
        if self.sleep_state == SleepState.SLEEP_STATE_UNSPECIFIED:
            return None
        pipeline = self.pipeline if self.is_known else None
        return scheduler_pb2.Sleep(state=self.sleep_state, pipeline=pipeline)

    def to_text(self) -> str:
        """Returns the description of the pipeline as JSON; empty if there is none."""
        if not self.is_known:
            return ""
        return json_format.MessageToJson(self.pipeline, indent=None)

    def restore(self, text: str) -> None:
        """Takes over the description that an earlier leader has written as `text` (`to_text`). Does
        nothing if the text is empty, or if this leader has a description itself. A text that cannot
        be parsed is logged and dropped."""
        if not text or self.is_known:
            return
        try:
            self.pipeline = json_format.Parse(
                text, scheduler_pb2.PipelineDescription(), ignore_unknown_fields=True
            )
        except json_format.ParseError as error:
            log.warning("the lease does not describe the last pipeline: %s", error)
