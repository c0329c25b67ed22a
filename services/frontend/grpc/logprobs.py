"""Log-probabilities as messages of `inference.proto`."""

from collections.abc import Iterator, Sequence

from orcinus.v1 import inference_pb2

from services.frontend.request.logprobs import Logprobs
from services.frontend.text.token_texts import TokenTexts


def token_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Logprobs | None, *, n_top: int
) -> Iterator[inference_pb2.TokenLogprob]:
    """Yields a message for each token, with the log-probabilities of the token and of its `n_top`
    most likely alternatives. Yields nothing if `logprobs` is None."""
    if logprobs is None:
        return
    for place, token_id in enumerate(token_ids):
        message = _token(texts, token_id, logprobs.values[place], logprobs.ranks[place])
        for rank, (other, value) in enumerate(logprobs.alternatives(place, n_top), start=1):
            message.top.append(_token(texts, other, value, rank))
        yield message


def _token(
    texts: TokenTexts, token_id: int, logprob: float, rank: int
) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(
        token_id=token_id,
        logprob=logprob,
        rank=rank,
        text=texts.text(token_id),
        bytes=texts.to_bytes(token_id),
    )
