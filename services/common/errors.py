"""The errors that reach a client.

    OrcinusError
    ├── InvalidRequest      the client's mistake; names the field
    │   ├── ContextOverflow the prompt, or prompt and answer, exceed the model's context
    │   ├── TooLarge        too large; the server does not read the rest
    │   ├── Unsupported     in a form that the server does not read
    │   ├── UnknownModel    the named model is not served
    │   └── UnknownAdapter  the named adapter is not loaded
    ├── TimedOut            a timeout: the client was too slow, or the call took too long
    ├── Unauthenticated     no API key, or an unknown one
    ├── PermissionDenied    the caller is known, but not allowed to make the call
    ├── PoolFull            too many requests; says when to try again
    ├── Unavailable         no pipeline at the moment; trying again may help
    ├── RequestFailed       the request ends each pipeline that serves it; must not be retried
    ├── StaleEpoch          the sender belongs to an epoch that is over
    └── RequestCancelled    the client has cancelled the request

Each protocol translates these errors in exactly one place: `rpc_handlers.py` for gRPC,
`http/protocol/errors.py` for HTTP. A bug raises an error that is not in this tree. The client is
then told only that there was an internal error.
"""

from collections.abc import Sequence
from typing import Self

MAX_MESSAGE_LENGTH = 1000
"""Largest number of characters of an error's message, including any text of the client that the
message repeats."""

RETRY_AFTER_S = 1.0
"""Seconds after which a client that was refused because of too many requests may try again, unless
the refusal names another time. In this time a few short answers are completed."""

MAX_QUOTE_LENGTH = 80
"""Largest number of characters of a client's own text that an error's message repeats."""


def shortened(text: str, max_length: int = MAX_QUOTE_LENGTH) -> str:
    """Returns at most `max_length` characters of `text`. If `text` is longer, the last of these
    characters is `…`."""
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def listed(names: Sequence[str]) -> str:
    """Returns at least one name as a phrase: `'a'`, `'a' and 'b'`, `'a', 'b' and 'c'`."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} and {last}" if others else last


class OrcinusError(Exception):
    """Base of all errors that a client may see."""

    def __init__(self, message: str) -> None:
        self.message = shortened(message, MAX_MESSAGE_LENGTH)
        super().__init__(self.message)


class InvalidRequest(OrcinusError):
    """The request breaks a rule. `field` is the name of the wrong field, as the client spells
    it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field

    def renamed(self, field: str) -> Self:
        """Returns a copy of this error that names the field `field`."""
        renamed = type(self).__new__(type(self))
        renamed.__dict__.update(self.__dict__)
        InvalidRequest.__init__(renamed, field, self.message.removeprefix(f"{self.field}: "))
        return renamed


class ContextOverflow(InvalidRequest):
    """The prompt fills the model's context, or leaves too little of it for an answer of the
    requested length.

    Agents (clients with long conversations) recognise this error and shorten the conversation.
    """

    def __init__(
        self, field: str, message: str, *, context: int, n_prompt: int = 0, n_answer: int = 0
    ) -> None:
        """`context` is the number of tokens that prompt and answer may have together. `n_prompt` is
        the number of tokens of the prompt, or 0 if only the number of characters is known.
        `n_answer` is the number of tokens of the requested answer if the prompt fits and only the
        answer does not, otherwise 0."""
        super().__init__(field, message)
        self.context = context
        self.n_prompt = n_prompt
        self.n_answer = n_answer


class TooLarge(InvalidRequest):
    """The request is larger than any request may be. The server did not read the rest of it."""


class Unsupported(InvalidRequest):
    """The request's body has a form that this server does not read."""


class UnknownModel(InvalidRequest):
    """The request names a model that is not served, or that the caller may not use."""

    def __init__(self, model: str, *, served: Sequence[str]) -> None:
        """`served` are the names of the models that the caller may use."""
        message = f"{shortened(model)!r} is not served here"
        if served:
            message += f"; {listed(served)} {'is' if len(served) == 1 else 'are'}"
        super().__init__("model", message if model or served else "none is served to this caller")


class UnknownAdapter(InvalidRequest):
    """The request names an adapter that is not loaded."""


class TimedOut(OrcinusError):
    """The client did not send or read in time, or its call exceeded the time limit of calls."""

    def __init__(self, message: str, *, may_retry: bool = True) -> None:
        """`may_retry` says whether trying again may help. It is false, for example, if the client's
        own deadline was too short."""
        super().__init__(message)
        self.may_retry = may_retry


class Unauthenticated(OrcinusError):
    """The caller presents no API key, or an unknown one."""


class PermissionDenied(OrcinusError):
    """The caller is known but not allowed to make this call."""


class PoolFull(OrcinusError):
    """There are too many requests, there is too much data of clients, or one client has used up its
    share. Trying again later may help."""

    def __init__(self, message: str, *, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OrcinusError):
    """The request cannot be served at the moment, for example because there is no pipeline or this
    process is stopping. Trying again may help."""


class RequestFailed(OrcinusError):
    """The model cannot compute the request, or the request seems to end every pipeline that serves
    it. The request must not be tried again."""


class StaleEpoch(OrcinusError):
    """The sender of a message belongs to an epoch that is over."""


class RequestCancelled(OrcinusError):
    """The client has cancelled the request."""
