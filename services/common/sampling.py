"""The sampling options, which say how the next token of a request is chosen. They are defined only
here.

An option is a field of `SamplingParams`, with its default, its range, its effect, and its type in a
rank's table of requests. All other code is derived from the fields: the bodies of the HTTP API, the
conversion to and from `sampling.proto` (`sampling_proto.py`), the checks of frontend and scheduler,
and the columns on the ranks. Ranks do not check options again.

The module needs neither protobuf nor pydantic, because the engine core imports it where they are
not installed. The other options of a request, such as its length, stop strings and the number of
answers, are defined elsewhere.
"""

import dataclasses
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from services.common.errors import InvalidRequest

INT32_MAX, INT64_MIN, INT64_MAX = 2**31 - 1, -(2**63), 2**63 - 1

SEED_BITS = 53
"""Number of bits of a seed that is chosen at random. Clients whose numbers are doubles can repeat
such a seed exactly."""

MAX_STOP_TOKENS = 256
"""Largest number of stop tokens that a client may give. Stop tokens are sent to the scheduler once
for every answer to a request, and ranks mask each of them."""


MAX_LOGPROBS = 20
"""Largest number of alternatives to a token for which log-probabilities are returned, as in
OpenAI's API."""

MAX_PROMPT_LOGPROBS = 2**18
"""Largest number of log-probabilities for a prompt: for its tokens and their alternatives together.
"""

MAX_GRAMMAR_LENGTH = 2**19
"""Largest number of characters of a grammar. The schemas of 200 tools with 2 KB each fit."""

MAX_COMPILED_GRAMMARS = 8
"""Number of compiled grammars that a rank keeps in addition to the grammars of running requests.
The least recently used one is dropped first.

Requests with equal grammars share one lexer, which grows by about 750 bytes for each state, up to
15 MB.
"""

MAX_BIASES = 1024
"""Largest number of tokens to which a request may add a bias."""

MAX_ALLOWED_TOKENS = 16_384
"""Largest number of tokens in a client's `allowed_token_ids`. These tokens are sent to the
scheduler once for every answer to a request."""

MAX_BAD_TOKENS = 1024
"""Largest number of tokens that a client may ban. Ranks mask each of them."""

MAX_BAD_WORD_TOKENS = 4096
"""Largest number of tokens in all words together that a client may ban. Ranks compare the last
tokens of an output with each word."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The allowed values of an option that is a number from `low` to `high`."""

    low: float
    high: float

    def check(self, field: str, value: Any) -> None:
        """Raises InvalidRequest, which names `field`, if `value` is not in the range."""
        if isinstance(value, bool) or not self.low <= value <= self.high:  # NaN is in no range
            raise InvalidRequest(field, f"must be a number from {self.low:g} to {self.high:g}")


@dataclass(frozen=True, slots=True)
class WholeNumbers:
    """The allowed values of an option that is a whole number from `low` to `high`."""

    low: int
    high: int

    def check(self, field: str, value: Any) -> None:
        """Raises InvalidRequest, which names `field`, if the number `value` is not in the range."""
        if isinstance(value, bool) or not self.low <= value <= self.high:
            raise InvalidRequest(field, f"must be a whole number from {self.low} to {self.high}")


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The allowed values of an option that is a list of at most `max_length` tokens.
    `SamplingParams.check_vocabulary` checks whether the tokens exist."""

    max_length: int

    def check(self, field: str, value: Any) -> None:
        """Raises InvalidRequest, which names `field`, if `value` has too many tokens."""
        if len(value) > self.max_length:
            raise InvalidRequest(field, f"has {len(value)} tokens, {self.max_length} at most")


@dataclass(frozen=True, slots=True)
class TokenSequences:
    """The allowed values of an option that is a list of token sequences, with at most `max_tokens`
    tokens together."""

    max_tokens: int

    def check(self, field: str, value: Any) -> None:
        """Raises InvalidRequest, which names `field`, if a sequence in `value` is empty, or the
        sequences together have too many tokens."""
        if not all(value):
            raise InvalidRequest(field, "has a word without tokens")
        n_tokens = sum(map(len, value))
        if n_tokens > self.max_tokens:
            raise InvalidRequest(field, f"have {n_tokens} tokens, {self.max_tokens} at most")


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """The allowed values of an option that is a list of biases for at most `max_length` tokens.
    Each bias is a number from `low` to `high`."""

    max_length: int
    low: float
    high: float

    def check(self, field: str, value: Any) -> None:
        """Raises InvalidRequest, which names `field`, if `value` has too many biases, has a token
        twice, or has a number out of range."""
        if len(value) > self.max_length:
            raise InvalidRequest(field, f"has {len(value)} tokens, {self.max_length} at most")
        if len({token_id for token_id, _ in value}) < len(value):
            raise InvalidRequest(field, "names a token twice")
        for token_id, bias in value:
            Numbers(self.low, self.high).check(f"{field}.{token_id}", bias)


@dataclass(frozen=True, slots=True)
class Texts:
    """The allowed values of an option that is a text of at most `max_length` characters."""

    max_length: int

    def check(self, field: str, value: Any) -> None:
        """Raises InvalidRequest, which names `field`, if `value` is too long."""
        if len(value) > self.max_length:
            raise InvalidRequest(field, f"has {len(value)} characters, {self.max_length} at most")


@dataclass(frozen=True, slots=True)
class Option:
    """The allowed values of a sampling option, and the NumPy type of its column in a rank's table.
    The type is None for an option without a column."""

    allowed: Numbers | WholeNumbers | TokenLists | TokenSequences | TokenBiases | Texts
    column: str | None


def number(default: float, *, low: float, high: float, column: str) -> float:
    """Declares an option that is a number from `low` to `high`."""
    option = Option(Numbers(low, high), column)
    return dataclasses.field(default=default, metadata={Option: option})


def whole_number(default: int | Callable[[], int], *, low: int, high: int, column: str) -> int:
    """Declares an option that is a whole number from `low` to `high`."""
    metadata = {Option: Option(WholeNumbers(low, high), column)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def tokens(*, max_length: int) -> tuple[int, ...]:
    """Declares an option that is a list of tokens, empty by default."""
    return dataclasses.field(default=(), metadata={Option: Option(TokenLists(max_length), None)})


def sequences(*, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Declares an option that is a list of sequences of tokens, empty by default."""
    option = Option(TokenSequences(max_tokens), None)
    return dataclasses.field(default=(), metadata={Option: option})


def biases(*, max_length: int, low: float, high: float) -> tuple[tuple[int, float], ...]:
    """Declares an option whose value is a list of tokens, each with a number. The default is an
    empty list."""
    option = Option(TokenBiases(max_length, low, high), None)
    return dataclasses.field(default=(), metadata={Option: option})


def text(*, max_length: int) -> str:
    """Declares an option that is a text, empty by default."""
    return dataclasses.field(default="", metadata={Option: Option(Texts(max_length), None)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The options that determine how a request's tokens are chosen from the logits.

    A token depends only on the sequence before it, on these options and on its position, never on
    the batch, the number of stages or the epoch. `Ops.sample` says in which order the options
    apply.
    """

    min_tokens: int = whole_number(0, low=0, high=INT32_MAX, column="int64")
    """Tokens to generate before one of `stop_token_ids` may be sampled."""

    temperature: float = number(1.0, low=0, high=2, column="float32")
    """Divides the logits before the softmax; 0 takes the argmax (greedy)."""

    top_k: int = whole_number(0, low=-1, high=INT32_MAX, column="int64")
    """Keeps only the k most likely tokens; 0 and -1 keep all."""

    top_p: float = number(1.0, low=0, high=1, column="float64")
    """Keeps the smallest set of most likely tokens whose probabilities add up to this number; 0
    keeps the most likely token."""

    min_p: float = number(0.0, low=0, high=1, column="float32")
    """Drops tokens whose probability is less than this fraction of the probability of the most
    likely token."""

    presence_penalty: float = number(0.0, low=-2, high=2, column="float32")
    """Number that is subtracted once from the logit of every token that has been generated."""

    frequency_penalty: float = number(0.0, low=-2, high=2, column="float32")
    """Number that is subtracted from the logit of a token once for each time that the token was
    generated."""

    repetition_penalty: float = number(1.0, low=0.125, high=8, column="float32")
    """Penalty for all tokens in the prompt or the output: divides logits above 0, and multiplies
    logits below 0. It is applied before the other penalties, and all penalties are applied before
    the temperature."""

    seed: int = whole_number(
        lambda: secrets.randbits(SEED_BITS), low=INT64_MIN, high=INT64_MAX, column="int64"
    )
    """Seed of the random numbers. The same request with the same seed gives the same tokens from
    servers of one version that compute on CPUs with the native kernels; on GPUs tokens may differ
    (`docs/determinism.md`). A seed that is not set is chosen at random. The i-th answer to a
    request uses seed + i, modulo 2^64."""

    stop_token_ids: tuple[int, ...] = tokens(max_length=MAX_STOP_TOKENS)
    """Tokens that end the output, besides the model's own end-of-sequence tokens, which the
    frontend adds unless the client ignores them."""

    grammar: str = text(max_length=MAX_GRAMMAR_LENGTH)
    """Grammar that the output follows, as llguidance reads it: its dialect of Lark, or JSON
    (`services.grammar`). An empty text allows all outputs."""

    logit_bias: tuple[tuple[int, float], ...] = biases(max_length=MAX_BIASES, low=-100, high=100)
    """Numbers that are added to the logits of single tokens, after the penalties."""

    allowed_token_ids: tuple[int, ...] = tokens(max_length=MAX_ALLOWED_TOKENS)
    """The only tokens that may be sampled; if the list is empty, all tokens may be sampled."""

    bad_token_ids: tuple[int, ...] = tokens(max_length=MAX_BAD_TOKENS)
    """Tokens that are never sampled."""

    bad_words: tuple[tuple[int, ...], ...] = sequences(max_tokens=MAX_BAD_WORD_TOKENS)
    """Words that are never generated, each as its tokens. Where an output ends with all tokens of a
    word but the last, the last one is not sampled. Tokens of the prompt do not count."""

    @property
    def has_penalty(self) -> bool:
        """Whether an option makes tokens that have already occurred more or less likely."""
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties != (1, 0, 0)

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is always the argmax of the logits, and no option changes the
        logits."""
        return (
            self.temperature == 0
            and not self.min_tokens
            and not self.has_penalty
            and not self.logit_bias
            and not self.allowed_token_ids
            and not self.bad_token_ids
            and not self.bad_words
            and not self.grammar
        )

    def check_vocabulary(
        self, vocab_size: int, *, own_stop_token_ids: Collection[int] = ()
    ) -> None:
        """Checks that the tokens of all options are in the vocabulary, and that at least one token
        can always be sampled.

        `own_stop_token_ids` are the stop tokens of the model itself. They may be outside the
        vocabulary.

        Raises:
            InvalidRequest: an option breaks a rule. The error names the option.
        """
        biased = tuple(token_id for token_id, _ in self.logit_bias)
        stops = frozenset(self.stop_token_ids)
        for name, token_ids in (
            ("stop_token_ids", stops.difference(own_stop_token_ids)),
            ("logit_bias", biased),
            ("allowed_token_ids", self.allowed_token_ids),
            ("bad_token_ids", self.bad_token_ids),
            ("bad_words", tuple(token_id for word in self.bad_words for token_id in word)),
        ):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                raise InvalidRequest(name, f"tokens must be from 0 to {vocab_size - 1}")
        # The last tokens of all words may be banned at one place.
        banned = {*self.bad_token_ids, *(word[-1] for word in self.bad_words)}
        if self.min_tokens:
            banned |= stops
        if banned.issuperset(self.allowed_token_ids or range(vocab_size)):
            name = "bad_words" if self.bad_words else "bad_token_ids"
            name = "allowed_token_ids" if self.allowed_token_ids else name
            if not self.allowed_token_ids and self.min_tokens and stops:
                name = "stop_token_ids"
            raise InvalidRequest(name, "leave no token that may be sampled")

    def check(self, *, own_stop_token_ids: Collection[int] = ()) -> None:
        """Makes all checks of options that do not need the vocabulary.

        `own_stop_token_ids` are the model's tokens among `stop_token_ids`. They do not count
        against the number of stop tokens that a client may give.

        Raises:
            InvalidRequest: an option is out of its range, or cannot be used together with a
                grammar. The error names the option.
        """
        for (name, option), value, default in zip(
            OPTIONS.items(), _values_of(self), _DEFAULTS, strict=True
        ):
            if value is default or (type(value) is type(default) and value == default):
                continue  # the usual case
            if name == "stop_token_ids" and own_stop_token_ids:
                value = [token_id for token_id in value if token_id not in own_stop_token_ids]
            option.allowed.check(name, value)
        if self.grammar:  # a grammar decides when an output ends, and always allows some token
            for name in ("min_tokens", "allowed_token_ids", "bad_token_ids", "bad_words"):
                if getattr(self, name):
                    raise InvalidRequest(name, "not together with a grammar")


OPTIONS: dict[str, Option] = {
    field.name: field.metadata[Option] for field in dataclasses.fields(SamplingParams)
}
"""All options by their names, in the order in which they are checked."""

_values_of = attrgetter(*OPTIONS)
_DEFAULTS = tuple(field.default for field in dataclasses.fields(SamplingParams))
