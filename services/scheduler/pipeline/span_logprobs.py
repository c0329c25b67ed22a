"""Log-probabilities in the results of ranks: pieces, each of which belongs to one span of a
batch."""

from collections.abc import Mapping

from orcinus.v1 import worker_pb2

from services.scheduler.core.batch import SpanLogprobs


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
