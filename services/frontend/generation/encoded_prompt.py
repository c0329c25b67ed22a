"""A prompt as tokens, and the limits of the answers to it."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.request.conversation import Conversation
from services.frontend.request.generation_request import Prompt
from services.frontend.text.answer_format import PLAIN, AnswerFormat
from services.frontend.text.incremental_text import text_offsets
from services.frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens, and the limits of the answers to it."""

    prompt: Prompt
    token_ids: Sequence[int]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    answer_format: AnswerFormat = PLAIN
    left_out: tuple[str, ...] = ()
    """Names of fields whose values the chat template leaves out."""

    @property
    def context(self) -> Sequence[int]:
        """Tokens whose text the answer continues. Empty for a conversation, in which the answer is
        a new turn and begins a new text."""
        return () if isinstance(self.prompt, Conversation) else self.token_ids

    def text(self, tokenizer: Tokenizer) -> str:
        """Returns the text of the prompt."""
        return self.prompt if isinstance(self.prompt, str) else tokenizer.to_text(self.token_ids)

    def text_offsets(self, tokenizer: Tokenizer, *, are_added: bool) -> Sequence[int]:
        """Returns, for each token, the position in the prompt's text at which the token begins.
        Takes about 20 µs for each token. `are_added` says whether special tokens may have been put
        around the client's text."""
        if not isinstance(self.prompt, str):
            return text_offsets(tokenizer, self.token_ids)
        # The text of the client may itself spell special tokens.
        shown, text = tokenizer.with_special_tokens, self.prompt
        n_added = shown.n_tokens_before if are_added else 0
        n_before = len(shown.to_text(self.token_ids[:n_added]))
        n_before = max(n_before, shown.to_text(self.token_ids).find(text, n_before))
        offsets = text_offsets(shown, self.token_ids)
        return [min(max(0, offset - n_before), len(text)) for offset in offsets]
