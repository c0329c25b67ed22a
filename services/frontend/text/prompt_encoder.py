"""Turns prompts into tokens.

A prompt that is too long is refused as early as possible. The following are checked, in this order:
the number of its characters; the smallest number of tokens that a text of this length can have; for
a long text, the number of tokens of its pieces; the number of all its tokens, before the token ids
become Python numbers. Only counting (`count`) accepts prompts that are longer than the model's
context.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from services.common import errors
from services.frontend.request.conversation import JSON_BYTES, Conversation
from services.frontend.request.generation_request import (
    GenerationRequest,
    Prompt,
    n_characters,
    prompt_field,
)
from services.frontend.request.limits import ModelLimits
from services.frontend.request.memory_budget import Share
from services.frontend.request.refusals import Refusal, Refusals
from services.frontend.request.text_pair import TextPair
from services.frontend.request.text_parts import TextParts
from services.frontend.request.truncation import CutTooShort
from services.frontend.settings import FEWEST_CHARACTERS
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.template_sandbox import TooMuch, TooSlow
from services.frontend.text.text_pieces import (
    CUT_CHARACTERS,
    CUT_TOKENS,
    PIECE_CHARACTERS,
)
from services.frontend.text.text_threads import (
    INLINE_CHARACTERS,
    SHORT_CHARACTERS,
    TextThreads,
    encode_bytes,
)
from services.frontend.text.tokenizer import Tokenizer, TooManyTokens

Result = TypeVar("Result")

INLINE_TURNS = 32
"""Largest number of turns of a conversation that the event loop itself renders."""

INLINE_RENDER_S = 0.02
"""Seconds that rendering in the event loop may take. A template that has taken longer is rendered
only in threads from then on."""

INLINE_TOKENS = 4096
"""Largest number of tokens that the event loop itself turns into text, which takes two
milliseconds."""

TEXT_BYTES = 160
"""Bytes of memory that each token takes while tokens are turned into text."""

TURN_BYTES = 512
"""Bytes of memory that a turn takes while a conversation is rendered. The rendered text also takes
memory, at most a few times `max_characters`, for one conversation in each thread."""


COUNTED_CHARACTERS = 2 * 2**20
"""Number of characters of a prompt up to which `count` counts its tokens, even if the limit for
prompts that are to be answered is lower. Counting the tokens of so many characters takes about a
second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """The limits on the texts of one call."""

    max_characters: int = FEWEST_CHARACTERS
    """Largest number of characters of all texts of a call together, and of a rendered
    conversation."""
    render_limit_s: float = 1.0
    """Seconds of processor time within which a conversation must be rendered."""


class PromptEncoder:
    """Turns prompts into tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        limits: TextLimits,
        *,
        threads: TextThreads,
        refusals: Refusals,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._limits = limits
        self._refusals = refusals
        self._threads = threads
        self._is_template_slow = False

    def check_length(self, request: GenerationRequest, limits: ModelLimits | None) -> None:
        """Checks the lengths of a request's prompts as far as this is possible without tokenizing.
        The limits of the model are checked too, if they are known.

        Raises:
            InvalidRequest: a prompt is too long, or all prompts together are too long.
        """
        most = n_left = self._limits.max_characters
        if limits is not None and request.options.wants_vector:
            limits = limits.of_prompts_alone()
        for index, prompt in enumerate(request.prompts):
            field = request.field_of(index)
            n_left -= n_characters(prompt)
            if n_left < 0:
                if request.texts_field is not None and n_characters(prompt) <= most:
                    raise self._too_many_characters(request.texts_field.name)
                raise self._too_long(field, most, limits)
            is_cut = request.options.truncate_prompt_tokens is not None
            if limits is not None and not isinstance(prompt, Conversation) and not is_cut:
                self._check_model_length(field, prompt, limits)

    async def to_tokens(
        self,
        prompt: Prompt,
        limits: ModelLimits,
        share: Share,
        *,
        add_special_tokens: bool | None = None,
        field: str = "",
        cut_to: int | None = None,
    ) -> Sequence[int]:
        """Returns the tokens of a prompt, and checks that there are not too many for the model.
        `field` is the name of the prompt in the client's request. With `cut_to`, the end of a
        prompt with more tokens is cut off. The memory of the work is added to the call's share of
        the budget while the work lasts. By default, special tokens are put around texts, but not
        around conversations.

        Raises:
            InvalidRequest: the prompt is too long, its tokens are not in the vocabulary, or a
            conversation can't be rendered.
            PoolFull: too many texts wait.
        """
        field = field or prompt_field(prompt)
        if isinstance(prompt, tuple):
            prompt = prompt[:cut_to]
            limits.check_prompt(field, prompt)
            return prompt
        text = await self._text(prompt, limits, share, self._limits.max_characters)
        if add_special_tokens is None:
            add_special_tokens = not isinstance(prompt, Conversation)
        if cut_to is None:
            self._check_model_length(field, text, limits)
        max_tokens = limits.max_prompt_len
        whole = prompt if isinstance(prompt, TextPair) else text
        work = partial(
            self._encode,
            whole,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            type_stride=limits.token_type_stride,
            cut_to=cut_to,
        )
        try:
            token_ids = await self._work(work, text, share)
        except TooManyTokens as error:
            self._refusals[Refusal.PROMPT_TOO_LONG] += 1
            limits.check_length(field, error.n_tokens)
            raise
        limits.check_prompt(field, token_ids)
        return token_ids

    def left_out(self, prompt: Prompt) -> tuple[str, ...]:
        """Returns the names of fields of a prompt whose values the model does not see, because the
        chat template leaves them out."""
        if not isinstance(prompt, Conversation) or self._chat_template is None:
            return ()
        return self._chat_template.left_out(prompt)

    async def count(self, prompt: Prompt, limits: ModelLimits, share: Share) -> int:
        """Returns the number of tokens of a prompt, which may be longer than the model's context.
        For a text that is far too long, the number may be wrong by a few tokens in 50,000.

        Raises:
            InvalidRequest: the prompt has too many characters, or a conversation can't be rendered.
            PoolFull: too many texts wait.
        """
        if isinstance(prompt, tuple):
            return len(prompt)
        max_characters = max(self._limits.max_characters, COUNTED_CHARACTERS)
        if n_characters(prompt) > max_characters:
            raise self._too_long(prompt_field(prompt), max_characters, limits)
        text = await self._text(prompt, limits, share, max_characters)
        work = partial(
            self._count,
            text,
            add_special_tokens=not isinstance(prompt, Conversation),
            exact_up_to=limits.pipeline.max_model_len,
        )
        return await self._work(work, text, share)

    async def to_text(self, token_ids: Sequence[int], share: Share) -> str:
        """Returns the text of tokens, including special tokens.

        Raises:
            PoolFull: too many texts wait.
        """
        n_tokens = len(token_ids)
        work = partial(self._tokenizer.with_special_tokens.to_text, token_ids)
        if n_tokens <= INLINE_TOKENS:
            return work()
        return await self._threads.run(
            work, share, n_characters=n_tokens, n_bytes=TEXT_BYTES * n_tokens, is_short=False
        )

    async def _text(
        self,
        prompt: str | Conversation | TextPair | TextParts,
        limits: ModelLimits,
        share: Share,
        max_characters: int,
    ) -> str:
        if isinstance(prompt, TextPair | TextParts):
            return prompt.text
        if isinstance(prompt, str):
            return prompt
        return await self._render(prompt, limits, share, max_characters)

    async def _work(self, work: Callable[[], Result], text: str, share: Share) -> Result:
        """Calls `work`, which handles `text`, and returns its result. The call is made in the event
        loop if the text is short, else in a thread."""
        if len(text) <= INLINE_CHARACTERS:
            return work()
        return await self._threads.run(
            work,
            share,
            n_characters=len(text),
            n_bytes=encode_bytes(text[:PIECE_CHARACTERS]),
            is_short=len(text) <= SHORT_CHARACTERS,
        )

    def _encode(
        self,
        text: str | TextPair,
        *,
        add_special_tokens: bool,
        max_tokens: int,
        type_stride: int,
        cut_to: int | None,
    ) -> Sequence[int]:
        """Returns the tokens of a text. The tokens of a long text are counted first, piece by
        piece, because the memory for tokenizing grows with the number of tokens. If a long text is
        to be cut off, only as many of its first pieces become tokens as the cut needs.

        Raises:
            TooManyTokens: the text has more than `max_tokens` tokens, and is not to be cut off.
            InvalidRequest: `cut_to` is too small.
        """
        plain = text.text if isinstance(text, TextPair) else text
        to_tokens = partial(
            self._tokenizer.to_tokens,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            type_stride=type_stride,
            cut_to=cut_to,
        )
        if len(plain) > PIECE_CHARACTERS:
            if cut_to is None:
                self._count_pieces(plain, max_tokens, ends_early=True)
            else:
                text = self._beginning(text, cut_to)
        return array("I", _checked_cut(to_tokens, text))

    def _beginning(self, text: str | TextPair, n_tokens: int) -> str | TextPair:
        """Returns the beginning of a text, or of each of two texts, with at least `n_tokens` tokens
        if the whole text has so many."""
        if isinstance(text, TextPair):
            first, second = (
                self._tokenizer.beginning(each, n_tokens) for each in (text.first, text.second)
            )
            return TextPair(first, second)
        return self._tokenizer.beginning(text, n_tokens)

    def _count(self, text: str, *, add_special_tokens: bool, exact_up_to: int) -> int:
        """Returns the number of tokens of a text. The number is exact if the text is short, or has
        at most `exact_up_to` tokens."""
        try:
            if len(text) > PIECE_CHARACTERS:
                self._count_pieces(text, exact_up_to, ends_early=False)
        except TooManyTokens as error:
            return error.n_tokens
        return self._tokenizer.count_tokens(text, add_special_tokens=add_special_tokens)

    def _count_pieces(self, text: str, max_tokens: int, *, ends_early: bool) -> None:
        """Counts the tokens of a long text piece by piece.

        Raises:
            TooManyTokens: the text certainly has more than `max_tokens` tokens. With `ends_early`,
            counting stops there, and the error has only the number of tokens so far.
        """
        n_pieces = -(-len(text) // (PIECE_CHARACTERS - CUT_CHARACTERS))
        most = max_tokens + CUT_TOKENS * n_pieces
        n_tokens = self._tokenizer.count_in_pieces(text, up_to=most if ends_early else None)
        if n_tokens > most:
            raise TooManyTokens(n_tokens)

    def _check_model_length(
        self, field: str, prompt: str | tuple[int, ...] | TextPair | TextParts, limits: ModelLimits
    ) -> None:
        is_text = not isinstance(prompt, tuple)
        n_tokens = len(prompt) if isinstance(prompt, tuple) else self._fewest_tokens(prompt)
        if limits.is_too_long(n_tokens):
            self._refusals[Refusal.PROMPT_TOO_LONG] += 1
            limits.check_length(field, n_tokens, is_least=is_text)

    def _fewest_tokens(self, prompt: str | TextPair | TextParts) -> int:
        return self._tokenizer.min_tokens(n_characters(prompt))

    async def _render(
        self, conversation: Conversation, limits: ModelLimits, share: Share, max_characters: int
    ) -> str:
        template, n_turns = self._chat_template, conversation.n_parts
        if not conversation.messages:
            raise errors.InvalidRequest("messages", "must not be empty")
        if template is None:
            raise errors.InvalidRequest(
                "messages", "the model has no chat template; send a prompt instead"
            )
        render = partial(template.render, conversation, max_characters=max_characters)
        length = n_characters(conversation)
        is_small = length <= INLINE_CHARACTERS and n_turns <= INLINE_TURNS
        limit_s = self._limits.render_limit_s
        try:
            if is_small and not self._is_template_slow:
                try:
                    return render(limit_s=min(limit_s, INLINE_RENDER_S))
                except TooSlow:
                    self._is_template_slow = True
            return await self._threads.run(
                partial(render, limit_s=limit_s),
                share,
                n_characters=length,
                n_bytes=TURN_BYTES * n_turns + JSON_BYTES * conversation.n_json_characters,
                is_short=is_small and not self._is_template_slow,
            )
        except TooSlow as error:
            self._refusals[Refusal.PROMPT_TOO_LONG] += 1
            raise errors.InvalidRequest(
                "messages", f"are too much for the model's chat template: {error}"
            ) from error
        except TooMuch as error:
            raise self._too_long("messages", max_characters, limits) from error

    def _too_many_characters(self, field: str) -> errors.InvalidRequest:
        """Counts a refusal, and returns the error for a list of prompts that have too many
        characters together."""
        self._refusals[Refusal.PROMPT_TOO_LONG] += 1
        return errors.InvalidRequest(
            field,
            f"all texts together have more than {self._limits.max_characters} characters, with "
            "what is repeated for each; send fewer at once",
        )

    def _too_long(
        self, field: str, max_characters: int, limits: ModelLimits | None
    ) -> errors.InvalidRequest:
        """Counts a refusal, and returns the error for a prompt that has too many characters."""
        self._refusals[Refusal.PROMPT_TOO_LONG] += 1
        message = f"has more than {max_characters} characters"
        if limits is None:
            return errors.InvalidRequest(field, message)
        return limits.too_many_characters(field, message)


def _checked_cut(
    to_tokens: Callable[[str | TextPair], Sequence[int]], text: str | TextPair
) -> Sequence[int]:
    """Returns the tokens of a text. Raises InvalidRequest if the client wants the text cut to too
    few tokens."""
    try:
        return to_tokens(text)
    except CutTooShort as error:
        raise errors.InvalidRequest("truncate_prompt_tokens", str(error)) from error
