"""A client's request, independent of its protocol, and the rules that a request must keep.

The protocols check only what their own syntax needs. `services.common.sampling` defines and checks
the sampling options. `ModelLimits` checks the rules that depend on the limits of the model. This
module has the other rules. Errors name fields as clients spell them.
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
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.output_format import OutputFormat
from services.frontend.request.resumption import SEED_FIELD, Resumption
from services.frontend.request.text_pair import TextPair
from services.frontend.request.text_parts import TextParts
from services.frontend.request.texts_field import TextsField

DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` for text and token prompts, as in the OpenAI API."""

MAX_N = 128
"""Largest number of answers to one prompt, as in the OpenAI API."""

MAX_ANSWERS = 1024
"""Largest number of answers to one request, over all its prompts."""

MAX_STOPS = 16
"""Largest number of stop strings. The number is limited because each is searched for at every
character."""

MAX_BAD_WORDS = 256
"""Largest number of texts in `bad_words`. The number is limited because each text is tokenized
twice."""

MAX_BAD_WORD_LENGTH = 1024
"""Largest number of characters of a text in `bad_words`."""

MAX_BAD_CHARACTERS = 2**14
"""Largest number of characters of all texts in `bad_words` together. The event loop tokenizes them,
which takes a few milliseconds."""

MAX_SALT_LENGTH = 256
"""Largest number of characters in `cache_salt`."""

MAX_STOP_LENGTH = 1024
"""Largest number of characters in a stop string. Text of this length may have to be held back."""

TOKEN_BYTES = 40
"""Bytes of memory that a token takes: an integer object, and the reference to it in a tuple."""

ANSWER_BYTES = 256
"""Bytes of memory that a resumed answer takes besides its tokens."""

MAX_TOKENS = WholeNumbers(1, INT32_MAX)
MAX_TOKENS_OF_TEXT = WholeNumbers(0, INT32_MAX)
"""Allowed values of `max_tokens` for prompts of text or tokens. An answer to such a prompt may have
no tokens."""
_N = WholeNumbers(1, MAX_N)
_N_LOGPROBS = WholeNumbers(0, MAX_LOGPROBS)


Prompt = str | tuple[int, ...] | Conversation | TextPair | TextParts
"""Type of a prompt: text, tokens, a conversation, two texts or a text in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Options that say how to continue a prompt. `inference.proto` documents the options and their
    defaults."""

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"  # as the client spells it
    default_max_tokens: int | None = None
    """The checkpoint's default of `max_tokens`. It applies if the client sets no value, unless the
    default for this kind of prompt is lower."""
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    defaulted: Set[str] = dataclasses.field(default=frozenset(), compare=False)
    """Names of the options of `sampling` that the client left out and for which the checkpoint's
    defaults are used."""
    format_field: str = "format"  # the field that asks for the grammar, as the client spells it
    format_schema: ClientSchema | None = None
    """The JSON schema from which the grammar is made; None for other formats."""
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    """Texts that are never generated. `with_bad_words` adds their tokens to the option `bad_words`
    of `sampling`."""
    ignore_eos: bool = False
    return_token_ids: bool = False
    n: int = 1
    add_special_tokens: bool | None = None
    """Whether special tokens are put around the prompt as the tokenizer of the checkpoint does for
    texts. By default this is done for texts, but not for conversations, because the chat template
    writes the special tokens."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    """Whether the text of an answer includes the stop string, or the text of the stop token, that
    ended the answer."""
    cache_salt: str = ""
    cache_prompt: bool = True
    """Whether the request may share keys and values in the prefix cache with requests whose prompts
    begin with the same tokens."""
    best_of: int | None = None  # answers to generate for each prompt; the n best are returned
    echo: bool = False  # returns the prompt before the answer, which may then have no tokens
    n_logprobs: int | None = None  # alternatives of each token; None for no log-probabilities
    n_prompt_logprobs: int | None = None  # likewise for the tokens of the prompt after the first
    logprobs_field: str = "logprobs"  # as the client spells `n_logprobs`
    priority: int = DEFAULT_PRIORITY  # requests with a lower number begin earlier
    wants_vector: bool = False
    """Whether the request is for the vector of each prompt, instead of an answer to it."""
    wants_score: bool = False
    """Whether the vector must be the score of a pair of texts."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens to which longer prompts for vectors are cut off, -1 for as many as the model
    takes. None means that prompts which are too long are refused."""
    receipt: bool = False
    """Whether each answer has a receipt that says how the answer was made."""
    is_receipt_optional: bool = False
    """Whether an answer comes without a receipt if none can be made, because the client has not
    asked for one."""

    @property
    def operation(self) -> str:
        """OpenTelemetry's name of the operation, for a request whose prompts are texts or
        tokens."""
        return "embeddings" if self.wants_vector else "text_completion"

    @property
    def n_generated(self) -> int:
        """Number of answers that are generated for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def shows_tokens(self) -> bool:
        """Whether the client sees the tokens of answers, and not only their text."""
        return self.return_token_ids or self.n_logprobs is not None

    @property
    def is_ranked(self) -> bool:
        """Whether more answers are generated (`best_of`) than are returned (`n`)."""
        return self.n_generated > self.n

    @property
    def n_ranked(self) -> int | None:
        """Number of alternatives to each output token whose log-probabilities the scheduler must
        send. It is 0 if only the log-probabilities of the output tokens are needed, for example to
        find the best answers, and None if none are needed."""
        if self.n_logprobs is None and self.is_ranked:
            return 0
        return self.n_logprobs

    @property
    def n_bytes(self) -> int:
        """Approximate memory of the options, in bytes. The request takes this memory once, and each
        answer takes as much again while the scheduler has it."""
        sampling = self.sampling
        n_tokens = len(sampling.allowed_token_ids) + len(sampling.bad_token_ids)
        n_tokens += len(sampling.stop_token_ids) + 3 * len(sampling.logit_bias)
        n_tokens += sum(map(len, sampling.bad_words))
        n_characters = getsizeof(sampling.grammar) + getsizeof(self.cache_salt)
        n_characters += sum(map(getsizeof, self.bad_words))
        return n_characters + TOKEN_BYTES * n_tokens

    @property
    def format(self) -> OutputFormat:
        """Format of the output that the client asks for."""
        return OutputFormat(self.format_field, self.sampling.grammar, self.format_schema)

    def with_format(self, format: OutputFormat) -> Self:
        """Returns the options with the output format `format`."""
        sampling = replace(self.sampling, grammar=format.grammar)
        return replace(
            self, sampling=sampling, format_field=format.field, format_schema=format.schema
        )

    def check(self) -> None:
        """Checks all rules for the options that do not depend on the model.

        Raises:
            InvalidRequest: a value is out of its range, or two options contradict each other.
        """
        if self.sampling.grammar:
            OPTIONS["grammar"].allowed.check(self.format_field, self.sampling.grammar)
            for name in ("ignore_eos", "bad_words"):
                if getattr(self, name):
                    raise errors.InvalidRequest(name, f"not together with {self.format_field}")
        if self.max_tokens is not None:
            MAX_TOKENS_OF_TEXT.check(self.max_tokens_field, self.max_tokens)
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
        _check_bad_words(self.bad_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """The request of one client call. Each of its prompts gets `options.n` answers. If there is a
    resumption, the answers continue where a stream broke."""

    prompts: tuple[Prompt, ...]
    options: GenerationOptions = dataclasses.field(default_factory=GenerationOptions)
    model: str = ""
    resumption: Resumption | None = None
    texts_field: TextsField | None = None
    """Field of the client's request that has the prompts for vectors. If it is None, the name of
    the field follows from the prompt (`prompt_field`)."""

    def field_of(self, index: int) -> str:
        """Returns the name of the field, in the client's request, that holds the prompt with the
        index `index`."""
        if self.texts_field is not None:
            return self.texts_field.item(index)
        return prompt_field(self.prompts[index])

    @property
    def _list_field(self) -> str:
        return "prompt" if self.texts_field is None else self.texts_field.name

    @property
    def n_answers_field(self) -> str:
        """Name of the field, in the client's request, that determines the number of answers. Error
        messages use it."""
        if self.texts_field is not None:
            return self.texts_field.name
        return "n" if len(self.prompts) == 1 else "prompt"

    @property
    def n_answers(self) -> int:
        """Number of answers to all prompts together."""
        return len(self.prompts) * self.options.n_generated

    @property
    def n_bytes(self) -> int:
        """Approximate memory of the request, in bytes."""
        n_bytes = getsizeof(self.model) + sum(map(getsizeof, self.options.stop))
        n_bytes += self.options.n_bytes
        for prompt in self.prompts:
            match prompt:
                case str():
                    n_bytes += getsizeof(prompt)
                case Conversation():
                    n_bytes += prompt.n_bytes
                case TextPair():
                    n_bytes += getsizeof(prompt.first) + getsizeof(prompt.second)
                case TextParts():
                    n_bytes += sum(map(getsizeof, prompt.parts))
                case tuple():
                    n_bytes += TOKEN_BYTES * len(prompt)
        if self.resumption is not None:
            n_bytes += ANSWER_BYTES * len(self.resumption.answers)
            n_bytes += TOKEN_BYTES * self.resumption.n_tokens
        return n_bytes

    def resumed(self, resumption: Resumption, *, own_seed: int | None) -> Self:
        """Returns the request with the resumption `resumption`. `own_seed` is the seed that the
        client has set in the request itself, or None.

        Raises:
            InvalidRequest: `own_seed` differs from the seed of the stream, or the seed of the
            stream is out of its range.
        """
        OPTIONS["seed"].allowed.check(SEED_FIELD, resumption.seed)
        if own_seed is not None and own_seed != resumption.seed:
            raise errors.InvalidRequest(SEED_FIELD, f"is not the request's own seed, {own_seed}")
        sampling = replace(self.options.sampling, seed=resumption.seed)
        options = replace(self.options, sampling=sampling)
        return replace(self, options=options, resumption=resumption)

    def check(self) -> None:
        """Checks all rules for the request that do not depend on the model.

        Raises:
            InvalidRequest: there is no prompt, or too many, an option is out of its range, or the
            resumption belongs to another request.
        """
        self.options.check()
        if not self.prompts:
            raise errors.InvalidRequest(self._list_field, "must not be empty")
        for prompt in self.prompts:
            if isinstance(prompt, Conversation):
                prompt.check()
                if self.options.max_tokens is not None:
                    MAX_TOKENS.check(self.options.max_tokens_field, self.options.max_tokens)
        if self.n_answers > MAX_ANSWERS:
            raise errors.InvalidRequest(
                self._list_field,
                f"asks for more than {MAX_ANSWERS} answers at once",
            )
        if self.resumption is not None:
            self.resumption.check(n_answers=self.n_answers)
            if not self.options.return_token_ids:
                raise errors.InvalidRequest(
                    "return_token_ids", "must be true: only streams that show tokens are resumed"
                )


def n_characters(prompt: Prompt) -> int:
    """Returns the number of characters of a prompt: of the text, or of all parts of a conversation.
    Returns 0 for tokens."""
    match prompt:
        case str():
            return len(prompt)
        case Conversation() | TextPair() | TextParts():
            return prompt.n_characters
    return 0


def prompt_field(prompt: Prompt) -> str:
    """Returns the name of the field, in the client's request, that holds a prompt of this type."""
    return "messages" if isinstance(prompt, Conversation) else "prompt"


def _check_bad_words(words: Sequence[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise errors.InvalidRequest(
            "bad_words", f"has {len(words)} texts; at most {MAX_BAD_WORDS} may be"
        )
    if sum(map(len, words)) > MAX_BAD_CHARACTERS:
        raise errors.InvalidRequest(
            "bad_words", f"has more than {MAX_BAD_CHARACTERS} characters in all texts together"
        )
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
            raise errors.InvalidRequest(
                "bad_words",
                f"each text must have 1 to {MAX_BAD_WORD_LENGTH} characters, not only spaces",
            )


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise errors.InvalidRequest("stop", f"has {len(stops)} texts; at most {MAX_STOPS} may be")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise errors.InvalidRequest(
                "stop", f"each text must have 1 to {MAX_STOP_LENGTH} characters"
            )
