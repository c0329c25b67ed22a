"""A request that was submitted to the scheduler, with the output tokens that have come so far.

All tokens of the request are kept, so that it can be submitted again with these tokens. Each event
says where in the output its tokens belong. So no token is delivered twice, and a missing token is
noticed.
"""

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Protocol

from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.frontend.link.scheduler_events import Event, OutputTokens, PromptLogprobs
from services.frontend.observing.request_span import RequestSpan

MAX_EXTENSIONS = 5
"""How often the time of a request is extended after consecutive losses, without a token in between.
The limit ends a request that crashes each scheduler or pipeline."""


class EventSink(Protocol):
    """Receives the events of a request, or of several requests of one call."""

    def put_nowait(self, event: Event, /) -> None: ...


@dataclass(slots=True, kw_only=True)
class SubmittedRequest:
    """The state of a request, from its submission to its end."""

    submission: scheduler_pb2.Submission
    inbox: EventSink
    model: str
    until: float
    deadline: float | None = None
    span: RequestSpan
    was_held: bool = False
    was_sent: bool = False
    is_accepted: bool = False  # whether the scheduler that leads now has accepted the request
    n_extensions: int = 0  # how often `until` was extended since the last token
    n_at_loss: int = 0  # number of tokens when the pipeline was last lost
    is_stalled: bool = False  # whether no token has come since the pipeline was lost
    was_lost: bool = False  # whether a loss is not recovered from yet, see `_recover`
    next_prompt_position: int = 1  # position of the prompt's next log-probabilities
    failure: str = ""  # message of the last failed attempt
    next_attempt: asyncio.TimerHandle | None = None  # only while the request is held
    request_id: str = field(init=False)
    wants_logprobs: bool = field(init=False)
    token_ids: "array[int]" = field(init=False)  # tokens of the output so far

    def __post_init__(self) -> None:
        submission = self.submission
        self.request_id = submission.request_id
        self.token_ids = array("I", submission.generated_token_ids)
        self.wants_logprobs = submission.HasField("n_logprobs") or submission.HasField(
            "n_prompt_logprobs"
        )

    @property
    def is_held(self) -> bool:
        """Whether the request is held, which means that it waits to be sent."""
        return self.next_attempt is not None

    def message(self) -> scheduler_pb2.ConnectRequest:
        """Returns the message that submits the request, with all tokens that were generated
        before."""
        submission = self.submission
        submission.generated_token_ids.extend(self.token_ids[len(submission.generated_token_ids) :])
        return scheduler_pb2.ConnectRequest(submission=submission)

    def suspend(self, n_losses: int) -> None:
        """Notes that the pipeline was lost; `n_losses` is the number of consecutive losses. The
        scheduler keeps the request for the next pipeline."""
        self.is_stalled = self.was_lost = True
        self.n_at_loss = len(self.token_ids)
        self.submission.n_losses = n_losses
        self.span.suspended(self.request_id, n_losses)

    def lose(self, *, until: float) -> None:
        """Notes that the scheduler has lost or refused the request, or never received it. If the
        scheduler had accepted the request, the request may now be held until `until`. The time is
        extended in this way for at most MAX_EXTENSIONS consecutive losses."""
        if self.is_accepted and self.n_extensions < MAX_EXTENSIONS:
            self.was_lost = True
            self.n_extensions += 1
            self.until = max(self.until, until)
            self.submission.is_resubmitted = True
        self.is_accepted = False

    def release(self) -> None:
        """Ends the time in which the request is held, and cancels its next scheduled attempt."""
        if self.next_attempt is not None:
            self.next_attempt.cancel()
            self.next_attempt = None

    def new_tokens(self, event: OutputTokens) -> OutputTokens:
        """Adds the tokens of an event to the request's tokens. Returns the event with only the
        tokens that are new.

        Raises:
            RequestFailed: tokens are missing, contradict earlier tokens, or lack their
            log-probabilities.
        """
        kept = self.token_ids
        n_kept = len(kept)
        if self.wants_logprobs:
            self._check_logprobs(event, has_tokens=n_kept > 0)
        if event.start != n_kept:
            n_known = n_kept - event.start
            if n_known < 0 or tuple(kept[event.start :]) != tuple(event.token_ids[:n_known]):
                raise errors.RequestFailed(
                    f"tokens from {event.start} on do not continue the {n_kept} that are there"
                )
            logprobs = event.logprobs and event.logprobs.part(n_known, len(event.token_ids))
            event = OutputTokens(event.request_id, event.token_ids[n_known:], n_kept, logprobs)
        kept.extend(event.token_ids)
        if self.was_lost:
            self._recover()
        return event

    def _recover(self) -> None:
        """Notes that a token has come since the last loss. When the second token has come, earlier
        losses are no longer counted."""
        if not self.submission.n_losses or len(self.token_ids) - self.n_at_loss > 1:
            self.submission.n_losses = 0
            self.was_lost = False
        self.n_extensions = 0
        self.is_stalled = False

    def new_prompt_logprobs(self, event: PromptLogprobs) -> PromptLogprobs | None:
        """Notes log-probabilities of the prompt, and returns the event with only the
        log-probabilities that are new. Returns None if there are no new ones.

        Raises:
            RequestFailed: log-probabilities of earlier tokens are missing.
        """
        n_known = self.next_prompt_position - event.position
        if n_known < 0:
            raise errors.RequestFailed(
                f"log-probabilities from position {event.position} on do not continue those before "
                f"{self.next_prompt_position}"
            )
        if n_known >= len(event.logprobs):
            return None
        new = event.logprobs.part(n_known, len(event.logprobs))
        event = PromptLogprobs(event.request_id, self.next_prompt_position, new)
        self.next_prompt_position += len(new)
        return event

    def _check_logprobs(self, event: OutputTokens, *, has_tokens: bool) -> None:
        """Raises RequestFailed if tokens come without the log-probabilities that the client
        requests. This happens if the scheduler is of another version."""
        submission = self.submission
        n_logprobs = 0 if event.logprobs is None else len(event.logprobs)
        if submission.HasField("n_logprobs") and n_logprobs != len(event.token_ids):
            raise errors.RequestFailed(
                f"{len(event.token_ids)} tokens came with {n_logprobs} log-probabilities"
            )
        n_prompt = len(submission.prompt_token_ids)
        is_due = submission.HasField("n_prompt_logprobs") and not has_tokens
        if is_due and self.next_prompt_position != n_prompt:
            raise errors.RequestFailed(
                f"a token came with log-probabilities of {self.next_prompt_position - 1} of "
                f"the {n_prompt} tokens of the prompt"
            )
