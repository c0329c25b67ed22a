"""Adds the log-probabilities of a span to the update of its request."""

from services.scheduler.core.batch import Update
from services.scheduler.core.request import FinishReason, Request, RequestState
from services.scheduler.core.span_logprobs import SpanLogprobs


def with_logprobs(request: Request, update: Update | None, logprobs: SpanLogprobs) -> Update | None:
    """Returns the update of a request with the log-probabilities of its span. If `update` is None,
    returns a new update without a token, or None if the request has ended. The update of a
    cancelled request gets no log-probabilities."""
    if update is None and request.state is not RequestState.FINISHED:
        update = Update(request, None, None, len(request.generated_token_ids))
    if update is None or update.finish_reason is FinishReason.CANCELLED:
        return update
    return update._replace(logprobs=logprobs)
