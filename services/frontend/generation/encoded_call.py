"""A client call after its prompts have been encoded: its options, the prompts as tokens, and the
model."""

from dataclasses import dataclass

from orcinus.v1 import scheduler_pb2

from services.common.pooling import Pooling
from services.frontend.generation.encoded_prompt import EncodedPrompt
from services.frontend.request.generation_request import GenerationOptions
from services.frontend.request.resumption import Resumption
from services.frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedCall:
    """A client call whose prompts have been encoded, and for which there is a pipeline."""

    request_id: str
    """Id of the call. A call that resumes a broken stream has the id of that stream."""
    options: GenerationOptions
    prompts: tuple[EncodedPrompt, ...]
    tokenizer: Tokenizer
    model: str
    """Name by which the scheduler knows the model."""
    shown_model: str
    """Name of the model, or of the adapter, that is shown to clients."""
    until: float
    """Time of the event loop's clock until which an answer may wait for a pipeline, if no scheduler
    has accepted the answer yet."""
    was_held: bool = False
    """Whether the call has waited for a pipeline."""
    resumption: Resumption | None = None
    """The part of a broken stream that the client has. None if the stream is new."""
    adapter: scheduler_pb2.Adapter | None = None
    """Adapter that makes the answers. None if the model itself makes them."""
    pooling: Pooling | None = None
    """How the model makes vectors. None if it makes none."""

    @property
    def n_answers(self) -> int:
        """Number of answers to all prompts together."""
        return len(self.prompts) * self.options.n_generated

    @property
    def n_prompt_tokens(self) -> int:
        """Number of tokens of all prompts together."""
        return sum([len(prompt.token_ids) for prompt in self.prompts])

    @property
    def is_uncached(self) -> bool:
        """Whether all tokens of the prompts must be computed, without keys and values from the
        prefix cache."""
        needs_all_states = self.pooling is not None and self.pooling.needs_all_states
        is_whole_vector = self.options.wants_vector and needs_all_states
        return not self.options.cache_prompt or is_whole_vector
