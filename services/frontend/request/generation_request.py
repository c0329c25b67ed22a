"""A client's request, whichever protocol it came by, and the rules that it must keep.

The protocols check only what their own syntax needs. How tokens are chosen is defined, and checked,
in `services.common.sampling`; the rules of the rest are here. What needs the model's limits is
checked by `Limits`. Fields are named as clients spell them.
"""

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from sys import getsizeof
from typing import Self

from services.common import errors
from services.common.priority import DEFAULT_PRIORITY, PRIORITIES
from services.common.sampling import INT32_MAX, MAX_LOGPROBS, OPTIONS, SamplingParams, WholeNumbers
from services.frontend.request.conversation import Conversation
from services.frontend.request.resumption import SEED_FIELD, Resumption

DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` for text and token prompts, as in the OpenAI API."""

MAX_N = 128
"""Answers to one prompt at most, as in the OpenAI API."""

MAX_ANSWERS = 1024
"""Answers to one request at most, over all its prompts."""

MAX_STOPS = 16
"""Stop strings at most: each is looked for in every character."""

MAX_SALT_LENGTH = 256
"""Characters in `cache_salt` at most."""

MAX_STOP_LENGTH = 1024
"""Characters in a stop string at most: as much text may have to be held back."""

TOKEN_BYTES = 40
"""Bytes that a token takes in memory: a number, and its place in a tuple."""

ANSWER_BYTES = 256
"""Bytes that an answer to go on with takes besides its tokens."""

MAX_TOKENS = WholeNumbers(1, INT32_MAX)
_MAX_TOKENS_ECHOED = WholeNumbers(0, INT32_MAX)
_N = WholeNumbers(1, MAX_N)
_N_LOGPROBS = WholeNumbers(0, MAX_LOGPROBS)


Prompt = str | tuple[int, ...] | Conversation
"""Text, tokens or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to continue; meanings and defaults are those of `inference.proto`."""

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"  # as this client spells it
    default_max_tokens: int | None = None
    """The checkpoint's limit of an answer, where the client has none and that of its kind of prompt
    is not lower."""
    lowers_max_tokens: bool = False  # to what fits, where clients cannot leave it out
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    defaulted: Set[str] = dataclasses.field(default=frozenset(), compare=False)
    """Names of the options of `sampling` that the client leaves to the checkpoint's defaults."""
    format_field: str = "format"  # the field that asks for the grammar, as this client spells it
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    return_token_ids: bool = False
    n: int = 1
    add_special_tokens: bool | None = None
    """Whether a prompt gets the tokens that the checkpoint puts around a text; by default texts get
    them, and conversations do not, since their template writes them."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    """Whether an answer's text has the stop string that ended it, or the text of the token."""
    cache_salt: str = ""
    cache_prompt: bool = True
    """Whether the request shares keys and values of equal beginnings with others."""
    best_of: int | None = None  # answers to generate for each prompt, of which the n best count
    echo: bool = False  # the prompt comes with the answer; then the answer may have no tokens
    n_logprobs: int | None = None  # alternatives that come with each token; None wants nothing
    n_prompt_logprobs: int | None = None  # likewise, with each token of the prompt but the first
    logprobs_field: str = "logprobs"  # as this client spells `n_logprobs`
    priority: int = DEFAULT_PRIORITY  # lower ones are begun earlier

    @property
    def n_generated(self) -> int:
        """Answers that are generated for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def shows_tokens(self) -> bool:
        """Whether clients see the tokens of answers, and not their text only."""
        return self.return_token_ids or self.n_logprobs is not None

    @property
    def n_ranked(self) -> int | None:
        """Alternatives that tokens have, also if only the best answers are to be found by them."""
        if self.n_logprobs is None and self.n_generated > self.n:
            return 0
        return self.n_logprobs

    @property
    def n_bytes(self) -> int:
        """About how many bytes of memory they take as they are, and for each answer."""
        sampling = self.sampling
        n_tokens = len(sampling.allowed_token_ids) + len(sampling.bad_token_ids)
        n_tokens += len(sampling.stop_token_ids) + 3 * len(sampling.logit_bias)
        n_characters = getsizeof(sampling.grammar) + getsizeof(self.cache_salt)
        return n_characters + TOKEN_BYTES * n_tokens

    def check(self) -> None:
        """Checks everything that doesn't depend on the model.

        Raises:
            InvalidRequest: a value is out of its range, or two contradict each other.
        """
        if self.sampling.grammar:
            OPTIONS["grammar"].allowed.check(self.format_field, self.sampling.grammar)
            if self.ignore_eos:
                raise errors.InvalidRequest("ignore_eos", f"not together with {self.format_field}")
        if self.max_tokens is not None:
            allowed = _MAX_TOKENS_ECHOED if self.echo else MAX_TOKENS
            allowed.check(self.max_tokens_field, self.max_tokens)
        self.sampling.check()
        _N.check("n", self.n)
        if self.best_of is not None:
            _N.check("best_of", self.best_of)
            if self.best_of < self.n:
                raise errors.InvalidRequest("best_of", f"must be at least n, which is {self.n}")
        if self.n_logprobs is not None:
            _N_LOGPROBS.check(self.logprobs_field, self.n_logprobs)
        if self.n_prompt_logprobs is not None:
            _N_LOGPROBS.check("prompt_logprobs", self.n_prompt_logprobs)
        PRIORITIES.check("priority", self.priority)
        if len(self.cache_salt) > MAX_SALT_LENGTH:
            raise errors.InvalidRequest(
                "cache_salt", f"must not have more than {MAX_SALT_LENGTH} characters"
            )
        _check_stops(self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One client call: prompts, each to be answered `options.n` times, from the start or, with a
    resumption, from where a stream broke."""

    prompts: tuple[Prompt, ...]
    options: GenerationOptions = dataclasses.field(default_factory=GenerationOptions)
    model: str = ""
    resumption: Resumption | None = None

    @property
    def n_answers(self) -> int:
        """The number of answers over all prompts."""
        return len(self.prompts) * self.options.n_generated

    @property
    def n_bytes(self) -> int:
        """About how many bytes of memory the request takes as it is."""
        n_bytes = getsizeof(self.model) + sum(map(getsizeof, self.options.stop))
        n_bytes += self.options.n_bytes
        for prompt in self.prompts:
            match prompt:
                case str():
                    n_bytes += getsizeof(prompt)
                case Conversation():
                    n_bytes += prompt.n_bytes
                case tuple():
                    n_bytes += TOKEN_BYTES * len(prompt)
        if self.resumption is not None:
            n_bytes += ANSWER_BYTES * len(self.resumption.answers)
            n_bytes += TOKEN_BYTES * self.resumption.n_tokens
        return n_bytes

    def resumed(self, resumption: Resumption, *, own_seed: int | None) -> Self:
        """Returns the request as it goes on. `own_seed` is the seed that the client gives for
        itself, if any.

        Raises:
            InvalidRequest: that is another seed than the stream's, or the latter is none.
        """
        OPTIONS["seed"].allowed.check(SEED_FIELD, resumption.seed)
        if own_seed is not None and own_seed != resumption.seed:
            raise errors.InvalidRequest(SEED_FIELD, f"is not the request's own seed, {own_seed}")
        sampling = replace(self.options.sampling, seed=resumption.seed)
        options = replace(self.options, sampling=sampling)
        return replace(self, options=options, resumption=resumption)

    def check(self) -> None:
        """Checks everything that doesn't depend on the model.

        Raises:
            InvalidRequest: there is no prompt, or too many, an option is out of its range, or the
            resumption is of another request.
        """
        self.options.check()
        if not self.prompts:
            raise errors.InvalidRequest("prompt", "must not be empty")
        for prompt in self.prompts:
            if isinstance(prompt, Conversation):
                prompt.check()
        if self.n_answers > MAX_ANSWERS:
            raise errors.InvalidRequest(
                "prompt", f"asks for more than {MAX_ANSWERS} answers at once"
            )
        if self.resumption is not None:
            self.resumption.check(n_answers=self.n_answers)
            if not self.options.return_token_ids:
                raise errors.InvalidRequest(
                    "return_token_ids", "must be true: only streams that show tokens are resumed"
                )


def n_characters(prompt: Prompt) -> int:
    """Returns the characters of a prompt, of all turns together if it is a conversation; 0 if it
    is tokens."""
    match prompt:
        case str():
            return len(prompt)
        case Conversation():
            return prompt.n_characters
    return 0


def prompt_field(prompt: Prompt) -> str:
    """Returns the name of the field that the prompt came in, as clients spell it."""
    return "messages" if isinstance(prompt, Conversation) else "prompt"


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise errors.InvalidRequest("stop", f"has {len(stops)} texts; at most {MAX_STOPS} may be")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise errors.InvalidRequest(
                "stop", f"each text must have 1 to {MAX_STOP_LENGTH} characters"
            )
