"""How a model turns the hidden states of a prompt into a vector (pooling): an embedding or a score.
Workers report this to schedulers and frontends.

A worker reports properties of its model as traits, which are names with texts. A worker whose model
makes vectors reports the trait `pooling`, whose text is the record `Pooling` in JSON. All stages of
a pipeline must have equal traits, so they all pool in the same way. Schedulers and frontends find
out from the traits of a pipeline which vectors it makes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Literal

TRAIT = "pooling"
"""Name of the trait."""

PoolingKind = Literal["last", "mean", "cls"]
"""Type of the ways to make one hidden state from all hidden states of a prompt: the state of the
last token, the mean of all states, or the state of the first token."""

PoolingHead = Literal["none", "classification", "yes-no"]
"""Type of the matrix by which the pooled state is multiplied: none, a classification head, or the
difference of two rows of the head that makes logits."""


PoolingSetting = Literal["", "last", "mean", "cls", "yes-no"]
"""Type of the setting `pooling`. If the setting is empty, the files of the checkpoint decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How a model turns the hidden states of a prompt, after its last norm, into a vector."""

    kind: PoolingKind
    n_values: int
    """Number of elements of the vector."""
    head: PoolingHead = "none"
    is_normalised: bool = False
    """Whether clients get vectors of length 1. The last stage reports vectors of any length."""
    has_sigmoid: bool = False
    """Whether a score is the logistic function of the number that the last stage reports."""
    answer_token_ids: tuple[int, ...] = ()
    """If the head is `yes-no`, the token that stands for yes and the token that stands for no."""
    generates: bool = False
    """Whether the model also generates tokens."""
    runs_whole: bool = False
    """Whether a prompt must be computed in one iteration, because each token attends to all tokens
    of the prompt, as in encoders."""
    padding_token_id: int | None = None
    """A token that prompts must not have, because it changes the positions of the tokens after it.
    None if there is no such token."""
    token_type_stride: int = 0
    """Number that is added to the ids of the tokens in the second text of a pair. 0 if the model
    does not distinguish the two texts."""

    @property
    def makes_scores(self) -> bool:
        """Whether the vector is a score of a pair of texts, and not the embedding of a text."""
        return self.head != "none"

    @property
    def needs_all_states(self) -> bool:
        """Whether the vector depends on hidden states of tokens before the last one. Then the whole
        prompt must be computed, even if keys and values of its beginning are stored."""
        return self.runs_whole or self.kind != "last"

    def to_traits(self) -> dict[str, str]:
        """Returns the trait (a name with a text) by which a worker reports this pooling."""
        return {TRAIT: json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))}


def pooling_in(traits: Mapping[str, str]) -> Pooling | None:
    """Returns the pooling that the workers of a pipeline report in `traits`. Returns None if they
    make no vectors, or if they are of a later version and report fields that are unknown here."""
    value = traits.get(TRAIT)
    return None if value is None else _parsed(value)


@lru_cache(maxsize=64)  # it is needed for each request
def _parsed(value: str) -> Pooling | None:
    record = json.loads(value)
    if not record.keys() <= {field.name for field in fields(Pooling)}:
        return None
    return Pooling(**{**record, "answer_token_ids": tuple(record["answer_token_ids"])})
