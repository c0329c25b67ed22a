"""Adds the log-probabilities or the vector of a request's span to the request's update, which is
the effect of the iteration on the request."""

from services.scheduler.core.batch import Update
from services.scheduler.core.request import FinishReason, Request, RequestState
from services.scheduler.core.span_logprobs import SpanLogprobs


def with_logprobs(request: Request, update: Update | None, logprobs: SpanLogprobs) -> Update | None:
    """Returns the update of a request with `logprobs`, the log-probabilities or the vector of the
    request's span. If `update` is None, returns a new update without a token, or None if the
    request has ended. The update of a cancelled request is returned unchanged."""
    if update is None and request.state is not RequestState.FINISHED:
        update = Update(request, None, None, len(request.generated_token_ids))
    if update is None or update.finish_reason is FinishReason.CANCELLED:
        return update
    return update._replace(logprobs=logprobs)
