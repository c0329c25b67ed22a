"""A prompt in tokens, and the limits of an answer to it."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.request.conversation import Conversation
from services.frontend.request.generation_request import Prompt
from services.frontend.text.message_format import PLAIN, AnswerFormat


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt in tokens, and the limits of an answer to it."""

    prompt: Prompt
    token_ids: Sequence[int]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    answer_format: AnswerFormat = PLAIN

    @property
    def context(self) -> Sequence[int]:
        """Tokens that the answer's text continues; none for a conversation, whose next turn stands
        alone."""
        return () if isinstance(self.prompt, Conversation) else self.token_ids
