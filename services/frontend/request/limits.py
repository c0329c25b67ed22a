"""Checks requests against the limits of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from orcinus.v1 import scheduler_pb2

from services.common import errors
from services.common.pooling import Pooling
from services.common.sampling import MAX_PROMPT_LOGPROBS
from services.frontend.request.generation_request import DEFAULT_MAX_TOKENS, GenerationOptions
from services.frontend.request.pipeline import ServedPipeline
from services.frontend.request.truncation import WHOLE


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Checks requests against the limits of the model that a pipeline serves."""

    pipeline: ServedPipeline
    served_names: tuple[str, ...] = ()
    """Names by which clients know the model. If there are none, clients use the name that the
    pipeline reports."""
    strict_max_tokens: bool = False
    """Whether a `max_tokens` that does not fit into the model's context is refused instead of being
    lowered."""

    needs_room: bool = True
    """Whether a prompt must leave room in the context for an answer."""

    def of_prompts_alone(self) -> Self:
        """Returns the same limits, but for prompts that get no answer, so they need not leave room
        for one in the context."""
        return replace(self, needs_room=False)

    @property
    def max_prompt_len(self) -> int:
        """Largest number of tokens of a prompt."""
        return self.pipeline.max_model_len - self.needs_room

    @property
    def pooling(self) -> Pooling | None:
        """How the model makes vectors (embeddings or scores); None if it makes none."""
        return self.pipeline.pooling

    @property
    def token_type_stride(self) -> int:
        """Number that is added to the id of each token in the second text of a pair, because the
        model tells the two texts apart by it. 0 if the model does not tell them apart."""
        return 0 if self.pooling is None else self.pooling.token_type_stride

    def check_kind(self, options: GenerationOptions) -> None:
        """Raises InvalidRequest if the model cannot make the kind of output that the request asks
        for: generated tokens, embeddings, or scores of pairs."""
        pooling = self.pooling
        if options.wants_vector and pooling is None:
            raise errors.InvalidRequest(
                "model",
                "makes no vectors: neither its files nor the workers' setting `pooling` say how",
            )
        if options.wants_vector and pooling is not None:
            if options.wants_score and not pooling.makes_scores:
                raise errors.InvalidRequest("model", "makes embeddings, and no scores of pairs")
            if pooling.makes_scores and not options.wants_score:
                raise errors.InvalidRequest("model", "makes scores of pairs, and no embeddings")
        if not options.wants_vector and pooling is not None and not pooling.generates:
            raise errors.InvalidRequest("model", "makes vectors, and generates no tokens")

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which clients know the model. Answers show the first name."""
        return self.served_names or (self.pipeline.model,)

    def check_model(self, model: str) -> None:
        """Raises UnknownModel if the client names neither the model nor one of its adapters. An
        empty name is allowed."""
        if model and model not in self.names and model not in self.pipeline.adapters:
            raise errors.UnknownModel(model, served=self.names[:1])

    def adapter(self, model: str) -> scheduler_pb2.Adapter | None:
        """Returns the adapter that a client selects by naming it as the model. Returns None if the
        client names the model itself, or no model."""
        if not model or model in self.names:
            return None
        digest = self.pipeline.adapters.get(model)
        return None if digest is None else scheduler_pb2.Adapter(name=model, digest=digest)

    def check_prompt(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest if a prompt is empty, is too long, leaves no room in the context
        for an answer, or has a token that is not in the vocabulary."""
        if not token_ids:
            raise errors.InvalidRequest(field, "must have at least one token")
        self.check_length(field, len(token_ids))
        self.check_tokens(field, token_ids)

    def check_text(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest if there are more tokens than the model can read, or a token is not
        in the vocabulary."""
        if len(token_ids) > self.pipeline.max_model_len:
            raise errors.InvalidRequest(
                field, f"has {len(token_ids)} tokens, {self.pipeline.max_model_len} at most"
            )
        self.check_tokens(field, token_ids)

    def cut_to(self, options: GenerationOptions) -> int | None:
        """Returns the number of tokens to which longer prompts are cut off, or None if prompts are
        not cut off. Raises InvalidRequest if the number that the client requests is not positive,
        or is more than the model takes."""
        n_tokens, most = options.truncate_prompt_tokens, self.max_prompt_len
        if n_tokens is None or n_tokens == WHOLE:
            return None if n_tokens is None else most
        if not 1 <= n_tokens <= most:
            raise errors.InvalidRequest(
                "truncate_prompt_tokens", f"must be {WHOLE}, or from 1 to {most}"
            )
        return n_tokens

    def is_too_long(self, n_tokens: int) -> bool:
        """Returns whether a prompt of `n_tokens` tokens is too long for the model's context, or
        leaves no room in it for an answer that the prompt is to get."""
        return n_tokens > self.max_prompt_len

    def check_length(self, field: str, n_tokens: int, *, is_least: bool = False) -> None:
        """Raises ContextOverflow if `is_too_long` is true of a prompt with `n_tokens` tokens.
        `is_least` says that the prompt may have more tokens than `n_tokens`, which the message then
        mentions."""
        if self.is_too_long(n_tokens):
            number = f"at least {n_tokens}" if is_least else str(n_tokens)
            what = f", {self.max_prompt_len} at most"
            if self.pooling is not None and self.pooling.runs_whole:
                what += (
                    ": the model reads a text in one iteration, so its length is limited by the "
                    "model's context and by `max_batch_tokens` of the scheduler"
                )
            elif self.needs_room:
                what = f", which leaves no room for an answer: {self._context_words}"
            raise errors.ContextOverflow(
                field,
                f"has {number} tokens{what}",
                context=self.pipeline.max_model_len,
                n_prompt=n_tokens,
            )

    def too_many_characters(self, field: str, message: str) -> errors.ContextOverflow:
        """Returns the error, with the text `message`, for a prompt that has too many characters to
        be tokenized."""
        return errors.ContextOverflow(
            field, f"{message}: {self._context_words}", context=self.pipeline.max_model_len
        )

    def max_new_tokens(self, options: GenerationOptions, *, n_prompt: int, is_chat: bool) -> int:
        """Returns the largest number of tokens that an answer may have: the client's `max_tokens`
        or, if it is not set, the default, lowered to the number of tokens that the prompt leaves
        free in the model's context. Returns 0 if the request is for vectors.

        Raises:
            ContextOverflow: the client's `max_tokens` does not fit, and the limit is strict.
            InvalidRequest: the client's `min_tokens` is larger than the result.
        """
        if options.wants_vector:
            return 0
        room = self.pipeline.max_model_len - n_prompt
        default = room if is_chat else min(DEFAULT_MAX_TOKENS, room)
        if options.default_max_tokens is not None:
            default = min(default, options.default_max_tokens)
        max_tokens = default if options.max_tokens is None else options.max_tokens
        if self.strict_max_tokens and max_tokens > room:
            raise errors.ContextOverflow(
                options.max_tokens_field,
                f"{max_tokens} with a prompt of {n_prompt} tokens are too many: "
                f"{self._context_words}",
                context=self.pipeline.max_model_len,
                n_prompt=n_prompt,
                n_answer=max_tokens,
            )
        max_tokens = min(max_tokens, room)
        if options.sampling.min_tokens > max_tokens:
            raise errors.InvalidRequest(
                "min_tokens",
                f"{options.sampling.min_tokens} exceeds the {max_tokens} tokens at most",
            )
        return max_tokens

    @property
    def _context_words(self) -> str:
        words = f"this model's maximum context length is {self.pipeline.max_model_len} tokens"
        return f"{words}, which prompt and answer share" if self.needs_room else words

    def check_prompt_logprobs(self, options: GenerationOptions, *, n_prompt: int) -> None:
        """Raises InvalidRequest if the client requests too many log-probabilities for a prompt of
        `n_prompt` tokens."""
        if options.n_prompt_logprobs is None:
            return
        n_numbers = n_prompt * (1 + options.n_prompt_logprobs)
        if n_numbers > MAX_PROMPT_LOGPROBS:
            raise errors.InvalidRequest(
                options.logprobs_field if options.echo else "prompt_logprobs",
                f"of a prompt of {n_prompt} tokens are {n_numbers} numbers, with alternatives; "
                f"{MAX_PROMPT_LOGPROBS} at most",
            )

    def stop_token_ids(self, options: GenerationOptions) -> tuple[int, ...]:
        """Returns the tokens that end an answer: the model's own, unless the client sets
        `ignore_eos`, and the tokens that the client names.

        Raises:
            InvalidRequest: an option names a token that is not in the vocabulary, or bans all
            tokens.
        """
        options.sampling.check_vocabulary(self.pipeline.vocab_size)
        clients = options.sampling.stop_token_ids
        own = () if options.ignore_eos else self.pipeline.eos_token_ids
        return tuple(dict.fromkeys((*own, *clients)))

    def check_tokens(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest if a token is not in the vocabulary, or may not be in a prompt."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.pipeline.vocab_size:
            raise errors.InvalidRequest(
                field, f"tokens must be from 0 to {self.pipeline.vocab_size - 1}"
            )
        padding = None if self.pooling is None else self.pooling.padding_token_id
        if padding is not None and padding in token_ids:
            raise errors.InvalidRequest(field, f"has the padding token, {padding}")
