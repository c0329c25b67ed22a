"""Log-probabilities in the results of ranks: pieces, each of which belongs to one span of a
batch."""

from collections.abc import Mapping

from orcinus.v1 import worker_pb2

from services.scheduler.core.span_logprobs import SpanLogprobs


class LogprobPieces:
    """Log-probabilities that a rank sent ahead of an iteration's result because they did not fit
    into that message."""

    def __init__(self) -> None:
        self._pieces: list[worker_pb2.SpanLogprobs] = []

    def add(self, early: worker_pb2.IterationLogprobs) -> None:
        """Keeps log-probabilities that arrived before the result of their iteration. They are added
        to the next result that is passed to `completed`."""
        self._pieces.extend(early.logprobs)

    def completed(self, result: worker_pb2.IterationResult) -> worker_pb2.IterationResult:
        """Returns the result of an iteration with all its pieces, in the order of their arrival."""
        if self._pieces:
            pieces = [*self._pieces, *result.logprobs]
            del result.logprobs[:]
            result.logprobs.extend(pieces)
            self._pieces.clear()
        return result


def logprobs_of(result: worker_pb2.IterationResult) -> Mapping[int, SpanLogprobs]:
    """Returns the log-probabilities of an iteration by the indices of spans in the batch."""
    by_span: dict[int, SpanLogprobs] = {}
    for piece in result.logprobs:
        logprobs = by_span.get(piece.span, SpanLogprobs())
        if piece.HasField("prompt_position"):
            prompt = (*logprobs.prompt, (piece.prompt_position, piece.logprobs))
            by_span[piece.span] = logprobs._replace(prompt=prompt)
        else:
            by_span[piece.span] = logprobs._replace(sampled=piece.logprobs)
    return by_span
