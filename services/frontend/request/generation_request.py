"""What a client asks for, whichever protocol it speaks, and the rules it must keep.

The rules are here and nowhere else; the protocols only check what their own syntax needs. Fields
are named as clients spell them. What needs the model's limits is checked by `Limits`, the rest by
the options.
"""

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from services.common import errors

DEFAULT_MAX_TOKENS = 16
"""For text and token prompts, as in the OpenAI API."""

MAX_N = 128
"""Answers to one prompt at most, as in the OpenAI API."""

MAX_ANSWERS = 1024
"""Answers of one request at most, over all its prompts."""

MAX_STOPS = 16
"""Stop strings at most: each is looked for in every character."""

MAX_STOP_TOKENS = 256
"""Stop tokens of a client at most: they travel with every answer, and ranks mask each of them."""

MAX_STOP_LENGTH = 1024
"""Characters in a stop string at most: as much text may have to be held back."""

INT32_MAX, INT64_MIN, INT64_MAX = 2**31 - 1, -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None

    def to_dict(self) -> dict[str, str]:
        """As chat templates want it: what is not given is not there."""
        turn = {"role": self.role, "content": self.content}
        return turn if self.name is None else {**turn, "name": self.name}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a conversation, oldest first; to be written out with the chat template."""

    messages: tuple[ChatMessage, ...]


Prompt = str | tuple[int, ...] | Conversation
"""Text, tokens or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to continue; the ranges and defaults are those of `inference.proto`."""

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"  # as this client spells it
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = dataclasses.field(default_factory=lambda: secrets.randbits(63))
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_token_ids: bool = False
    n: int = 1

    def check(self) -> None:
        """Checks everything that doesn't depend on the model.

        Raises:
            InvalidRequest: a value is out of its range.
        """
        if self.max_tokens is not None:
            _check_whole(self.max_tokens_field, self.max_tokens, 1, INT32_MAX)
        _check_whole("min_tokens", self.min_tokens, 0, INT32_MAX)
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_whole("top_k", self.top_k, -1, INT32_MAX)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise errors.InvalidRequest("top_p", "must be greater than 0")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.125, 8.0)
        _check_whole("seed", self.seed, INT64_MIN, INT64_MAX)
        _check_whole("n", self.n, 1, MAX_N)
        _check_stops(self.stop)
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise errors.InvalidRequest(
                "stop_token_ids",
                f"has {len(self.stop_token_ids)} tokens, {MAX_STOP_TOKENS} at most",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One client call: prompts, each to be answered `options.n` times."""

    prompts: tuple[Prompt, ...]
    options: GenerationOptions = dataclasses.field(default_factory=GenerationOptions)
    model: str = ""

    @property
    def n_answers(self) -> int:
        """Answers in all."""
        return len(self.prompts) * self.options.n

    def check(self) -> None:
        """Checks everything that doesn't depend on the model.

        Raises:
            InvalidRequest: there is no prompt, or too many, or an option is out of its range.
        """
        self.options.check()
        if not self.prompts:
            raise errors.InvalidRequest("prompt", "must not be empty")
        if self.n_answers > MAX_ANSWERS:
            raise errors.InvalidRequest(
                "prompt", f"asks for more than {MAX_ANSWERS} answers at once"
            )


def prompt_field(prompt: Prompt) -> str:
    """How clients spell the field that the prompt came in."""
    return "messages" if isinstance(prompt, Conversation) else "prompt"


def _check_whole(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not low <= value <= high:
        raise errors.InvalidRequest(field, f"must be a whole number from {low} to {high}")


def _check_number(field: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not low <= value <= high:  # NaN is in no range
        raise errors.InvalidRequest(field, f"must be a number from {low:g} to {high:g}")


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise errors.InvalidRequest("stop", f"has {len(stops)} texts; at most {MAX_STOPS} may be")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise errors.InvalidRequest(
                "stop", f"each text must have 1 to {MAX_STOP_LENGTH} characters"
            )
