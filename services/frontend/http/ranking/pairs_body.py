"""The common part of the bodies that ask for scores of pairs of texts."""

from collections.abc import Sequence
from typing import Annotated

from services.frontend.generation.vector_requests import score_request, vector_options
from services.frontend.http.bodies.object_kinds import IndexedModel
from services.frontend.http.bodies.ranges import PRIORITY, SALT, TRUNCATION
from services.frontend.request.generation_request import GenerationRequest
from services.frontend.request.texts_field import TextsField
from services.frontend.text.pair_format import PairFormat


class PairsBody(IndexedModel):
    """Fields of all bodies that ask for scores of pairs of texts."""

    model: str | None = None
    """Name of the model; may be left out if the caller may use only one."""
    instruction: str | None = None
    """Description of a relevant document, for models whose prompt has a place for it, such as
    Qwen3-Reranker. By default the model's own instruction is used."""
    priority: Annotated[int | None, PRIORITY] = None
    """Priority of the request, as for completions."""
    cache_salt: Annotated[str | None, SALT] = None
    """Salt of the prefix cache, as for completions."""
    truncate_prompt_tokens: Annotated[int | None, TRUNCATION] = None
    """Number of tokens, special ones included, to which longer pairs are cut off, the longer text
    first; -1 for as many as the model takes. By default a pair that is too long is refused."""
    user: str | None = None
    """Does nothing."""

    @property
    def cut_to(self) -> int | None:
        """Number of tokens to which longer pairs are cut off. None if pairs are not cut off."""
        return self.truncate_prompt_tokens

    def to_request(
        self, pairs: Sequence[tuple[str, str]], format: PairFormat, *, field: TextsField
    ) -> GenerationRequest:
        """Returns the request for the scores of pairs, in the form that all protocols share.
        `field` is the name that errors give to the body's field with one text for each pair.

        Raises:
            InvalidRequest: there are too many pairs.
        """
        options = vector_options(
            wants_score=True,
            priority=self.priority,
            cache_salt=self.cache_salt,
            truncate_prompt_tokens=self.cut_to,
        )
        return score_request(
            pairs,
            options,
            format=format,
            instruction=self.instruction,
            model=self.model or "",
            field=field,
        )
