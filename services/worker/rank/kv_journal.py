"""A rank's record of its keys and values, which the rank reports when it joins an epoch.

If keys and values outlive epochs, a record in the same memory says how much of them is complete
(`engine/kv_record.py`), and the first rank of the pipeline records which blocks hold which tokens
(`kept_blocks.py`). Otherwise `NoJournal` replaces the journal.
"""

from typing import Protocol

from orcinus.v1 import worker_pb2

from services.worker.engine.kv_record import KVRecord
from services.worker.rank.kept_blocks import KeptBlocks


class Journal(Protocol):
    """Records which keys and values a rank's memory holds, for all epochs of the rank's process."""

    def answer(self, request: worker_pb2.JoinPipelineRequest) -> worker_pb2.JoinPipelineResponse:
        """Returns the rank's response to a request to join an epoch. The response describes the
        keys and values that the rank's memory holds."""

    def note_begun(self, plan: worker_pb2.RunIterationsRequest) -> None:
        """Notes that an iteration is about to write keys and values."""

    def note_complete(self, iteration: int) -> None:
        """Notes that the keys and values of an iteration are complete."""

    def note_failed(self) -> None:
        """Notes that keys and values of this epoch may be damaged. Called if an iteration fails
        although no other rank is lost, or if its results are not finite."""


class NoJournal:
    """Replacement for `KVJournal` if keys and values do not outlive epochs."""

    def answer(self, request: worker_pb2.JoinPipelineRequest) -> worker_pb2.JoinPipelineResponse:
        """Returns an empty response."""
        return worker_pb2.JoinPipelineResponse()

    def note_begun(self, plan: worker_pb2.RunIterationsRequest) -> None:
        """Does nothing: keys and values do not outlive epochs."""

    def note_complete(self, iteration: int) -> None:
        """Does nothing: keys and values do not outlive epochs."""

    def note_failed(self) -> None:
        """Does nothing: keys and values do not outlive epochs."""


NO_JOURNAL = NoJournal()


class KVJournal:
    """The journal of keys and values in memory that outlives epochs."""

    def __init__(self, record: KVRecord) -> None:
        self._record = record
        self._kept_blocks = KeptBlocks()
        self._epoch = 0
        self._begun_iteration = 0
        self._has_failed = False  # in the epoch

    def answer(self, request: worker_pb2.JoinPipelineRequest) -> worker_pb2.JoinPipelineResponse:
        """Returns a response that describes the keys and values in the memory. On the first stage,
        it also lists the blocks of the prefix cache, if the request asks for them."""
        stored = self._record.stored
        is_known = stored.epoch == self._epoch and not self._has_failed
        answer = worker_pb2.JoinPipelineResponse()
        answer.stored_kv.add(
            memory=stored.memory,
            epoch=stored.epoch,
            iteration=stored.iteration,
            begun_iteration=self._begun_iteration if is_known else 0,
        )
        kept = self._kept_blocks.to_message()
        if request.wants_kept_blocks and request.stage_index == 0 and kept is not None:
            answer.kept_blocks.CopyFrom(kept)
        return answer

    def note_begun(self, plan: worker_pb2.RunIterationsRequest) -> None:
        """Records the plan's epoch and iteration, and the changes of the prefix cache that the plan
        names."""
        if plan.epoch != self._epoch:
            self._record.note_begun(plan.epoch)
            self._epoch, self._has_failed = plan.epoch, False
        self._begun_iteration = plan.iteration
        self._kept_blocks.begin(plan)

    def note_complete(self, iteration: int) -> None:
        """Records that the keys and values of the iteration are complete."""
        self._record.note_complete(iteration)

    def note_failed(self) -> None:
        """Makes later responses say that this process has begun no iteration, until the first plan
        of another epoch. So a new leader does not use the keys and values of the present epoch.

        The present leader removes blocks that contain numbers that are not finite from its prefix
        cache, but a rank does not know which later plan names these removals.
        """
        self._has_failed = True
