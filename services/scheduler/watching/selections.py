"""The event of a selected batch, with enough columns that two different batches have different
events."""

from collections.abc import Callable
from itertools import chain

from orcinus.v1 import watch_pb2

from services.scheduler.core.batch import Batch
from services.scheduler.core.request import Request


def selection_of(
    batch: Batch | None, number: Callable[[Request], int]
) -> watch_pb2.SelectionDecision:
    """Returns the event of a selection. `batch` is None if no batch was selected. `number` returns
    the number by which events name a request."""
    if batch is None:
        return watch_pb2.SelectionDecision()
    spans = batch.spans
    return watch_pb2.SelectionDecision(
        iteration=batch.iteration,
        numbers=[number(span.request) for span in spans],
        start_positions=[span.start_position for span in spans],
        n_tokens=[span.n_tokens for span in spans],
        n_drafts=[span.n_drafts for span in spans] if batch.n_drafts else (),
        n_new_blocks=[len(span.new_block_ids) for span in spans],
        new_block_ids=list(chain.from_iterable([span.new_block_ids for span in spans])),
        released_rows=batch.released_rows,
    )
