"""Log-probabilities in the results of ranks: pieces, each of which belongs to one span of a
batch."""

from collections.abc import Mapping

from orcinus.v1 import worker_pb2

from services.scheduler.core.span_logprobs import SpanLogprobs


class LogprobPieces:
    """Keeps log-probabilities and vectors (embeddings or scores) that a rank sent ahead of the
    result of an iteration, because they did not fit into the message with the result."""

    def __init__(self) -> None:
        self._early = worker_pb2.IterationLogprobs()

    def add(self, early: worker_pb2.IterationLogprobs) -> None:
        """Keeps log-probabilities and vectors that arrived before the result of their iteration.
        They are added to the next result that is passed to `completed`."""
        self._early.MergeFrom(early)

    def completed(self, result: worker_pb2.IterationResult) -> worker_pb2.IterationResult:
        """Returns `result`, completed with what `add` has kept for it, in the order of arrival."""
        early = self._early
        if early.logprobs or early.vectors:
            self._early = worker_pb2.IterationLogprobs()
            early.logprobs.extend(result.logprobs)
            del result.logprobs[:]
            result.logprobs.extend(early.logprobs)
            result.vectors.extend(early.vectors)
        return result


def logprobs_of(result: worker_pb2.IterationResult) -> Mapping[int, SpanLogprobs]:
    """Returns the log-probabilities and vectors of an iteration by the indices of its spans."""
    by_span: dict[int, SpanLogprobs] = {}
    for piece in result.logprobs:
        logprobs = by_span.get(piece.span, SpanLogprobs())
        if piece.HasField("prompt_position"):
            prompt = (*logprobs.prompt, (piece.prompt_position, piece.logprobs))
            by_span[piece.span] = logprobs._replace(prompt=prompt)
        else:
            by_span[piece.span] = logprobs._replace(sampled=piece.logprobs)
    for of_prompt in result.vectors:
        by_span[of_prompt.span] = SpanLogprobs(vector=of_prompt.vector)
    return by_span
